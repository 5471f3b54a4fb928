// What no correct peer sends is refused; that messages survive encoding is for verbs_message_fuzz.
#include "verbs/device/message.h"
#include "tests/test.h"

namespace baton::verbs {
namespace {

// A body as decode_message() hands it over.
template <typename T>
std::string message_of(Kind kind, const T& value) {
  std::string out;
  begin_message(out, kind, 7);
  encode(out, value);
  return out;
}

Endpoint endpoint() {
  Endpoint end;
  end.rail = 2;
  end.rails = 5;
  end.incarnation = 9;
  end.port = 1;
  end.origin = 3;
  end.recovery = true;
  end.mtu = IBV_MTU_1024;
  end.family = 1;
  end.rd_atomic = 16;
  end.lid = 7;
  end.receives = 128;
  end.queue_pair = 0x1234;
  end.sequence = 0xabcdef;
  end.gid.raw[15] = 4;
  end.traffic_class = 104;
  end.service_level = 3;
  return end;
}

RegionAnswer answer() {
  RegionAnswer told;
  told.name = {3, 4, 5};
  told.base = 0x7f0000000000;
  told.size = 1 << 20;
  told.access = Access::kRemoteRead;
  told.rkeys = {1, 2, 3};
  return told;
}

TEST(Message, WhatDoesNotFitIsRefused) {
  EXPECT_FALSE(decode_message("").ok());
  EXPECT_FALSE(decode_message(std::string("\xff\0\0\0", 4)).ok());
  EXPECT_FALSE(decode_message(std::string(kMessageBytes + 1, '\1')).ok());
  const auto refused = [](Endpoint end) {
    const std::string bytes = message_of(Kind::kConnect, end);
    return !decode_endpoint(decode_message(bytes)->body).ok();
  };
  EXPECT_FALSE(refused(endpoint()));
  Endpoint bad = endpoint();
  bad.rail = bad.rails;
  EXPECT_TRUE(refused(bad));
  bad = endpoint();
  bad.mtu = 9;
  EXPECT_TRUE(refused(bad));
  bad = endpoint();
  bad.queue_pair = 1 << 24;
  EXPECT_TRUE(refused(bad));
  bad = endpoint();
  bad.incarnation = 0;
  EXPECT_TRUE(refused(bad));
  RegionAnswer around = answer();
  around.base = UINT64_MAX - 5;
  EXPECT_FALSE(decode_answer(decode_message(message_of(Kind::kTell, around))->body).ok());
}

}  // namespace
}  // namespace baton::verbs
