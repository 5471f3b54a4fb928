// Messages survive encoding; what no correct peer sends is refused, whatever it is.
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

TEST(Message, RoundTrips) {
  const std::string connect = message_of(Kind::kConnect, endpoint());
  const auto message = decode_message(connect);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->kind, Kind::kConnect);
  EXPECT_EQ(message->credits, 7);
  const auto end = decode_endpoint(message->body);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(end->sequence, 0xabcdefu);
  EXPECT_EQ(end->origin, 3);
  EXPECT_TRUE(end->recovery);

  const std::string tell = message_of(Kind::kTell, answer());
  const auto told = decode_answer(decode_message(tell)->body);
  ASSERT_TRUE(told.ok());
  EXPECT_EQ(told->name, (RegionName{3, 4, 5}));
  EXPECT_EQ(told->rkeys, (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_TRUE(told->refusal.ok());

  RegionAnswer refused;
  refused.refusal = absl::NotFoundError("stale");
  const std::string no = message_of(Kind::kTell, refused);
  EXPECT_EQ(decode_answer(decode_message(no)->body)->refusal, refused.refusal);

  const Arrival arrival{.transfer = {1, 2},
                        .slice = 3,
                        .slice_bytes = 4,
                        .total_bytes = 5,
                        .counter_index = 6,
                        .counter_generation = 7,
                        .increment = 8,
                        .notify = "nine"};
  const std::string landed = message_of(Kind::kArrival, arrival);
  EXPECT_EQ(landed.size(), kHeaderBytes + kArrivalBytes + 4);
  const auto back = decode_arrival(decode_message(landed)->body);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->notify, "nine");
  EXPECT_EQ(back->increment, 8u);

  const auto offers = decode_offers(encode_offers({{.families = 3, .gids = {{}, {}}}}));
  ASSERT_TRUE(offers.ok());
  EXPECT_EQ(offers->front().families, 3);
  EXPECT_EQ(offers->front().gids.size(), 2u);
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

TEST(Message, DamagedBytesNeverDecodeBeyondTheirEnd) {
  std::mt19937_64 random(1);
  const std::string seeds[] = {message_of(Kind::kConnect, endpoint()),
                               message_of(Kind::kTell, answer()),
                               message_of(Kind::kArrival, Arrival{.notify = "abc"}),
                               message_of(Kind::kDrained, RailNote{.text = "because"})};
  size_t refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = seeds[random() % 4];
    bytes.resize(random() % (bytes.size() + 4));
    for (size_t k = random() % 3; k > 0 && !bytes.empty(); --k) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    const auto message = decode_message(bytes);
    if (!message.ok()) {
      ++refused;
      continue;
    }
    refused += !decode_endpoint(message->body).ok();
    refused += !decode_answer(message->body).ok();
    refused += !decode_note(message->body).ok();
    refused += !decode_name(message->body).ok();
    const auto arrival = decode_arrival(message->body);
    if (arrival.ok()) {
      EXPECT_LE(arrival->notify.size(), message->body.size());
    }
    refused += !decode_offers(message->body).ok();
  }
  EXPECT_GT(refused, 20'000u);
}

}  // namespace
}  // namespace baton::verbs
