// Peers that hold the key and misbehave, and strangers that reach UCX: the first lose their rail,
// the second are not heard.
#include "tests/test.h"
#include "tests/ucx/raw_peer.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {
namespace {

using framed::Frame;
using framed::FrameType;
using testing::HasSubstr;

class UcxHostile : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status status = Engine::check(kLoopback); !status.ok()) GTEST_SKIP() << status;
    address_ = node_.provider->listen().value();
  }
  // Lets both run until the node has lost its rail; why it has.
  std::string fate(RawPeer& raw) {
    until({&node_}, [&] {
      raw.engine->progress();
      return !node_.down.empty();
    });
    return std::string(node_.down.front().message());
  }
  // Whether a new peer gets in.
  void expect_serving() {
    node_.rails.clear();
    RawPeer another;
    another.join(node_, address_);
  }

  ProviderNode node_{"ucx", "node", {{"ucx.tls", "tcp"}}, "0123456789abcdef"};
  std::string address_;
};

TEST_F(UcxHostile, AMalformedIntroductionIsDisconnected) {
  for (const std::string words : {"", "x", "1234"}) {
    RawPeer raw;
    raw.introduce(node_, address_);
    raw.say(words);
    until({&node_}, [&] { return !raw.put("x"); });
  }
  EXPECT_TRUE(node_.rails.empty());
  expect_serving();
}

TEST_F(UcxHostile, AnIntroductionLongerThanAllowedIsHungUpOn) {
  RawPeer raw;
  raw.introduce(node_, address_);
  EXPECT_TRUE(raw.put("\xff\xff\xff\x7f"));
  until({&node_}, [&] { return !raw.put("x"); });
  expect_serving();
}

// Where a rail is found in UCX is said under keys of the handshake: who sits between two peers
// cannot lead them to another address, nor show them one of another connection.
TEST_F(UcxHostile, AnAddressThatWasChangedOnItsWayIsNotCalled) {
  std::string earlier;
  const size_t bytes = RawPeer().engine->address().size();
  // In the length, the rail's number, the address, and the tag.
  for (const size_t at :
       {size_t{0}, size_t{5}, size_t{9}, bytes / 2, bytes, bytes + 18, size_t{0}}) {
    RawPeer raw;
    raw.introduce(node_, address_);
    std::string words = raw.as_said(Introduction{0, raw.engine->address()}.encode());
    if (at == 0 && !earlier.empty()) {
      words = earlier;
    } else {
      earlier = words;
      ASSERT_LT(at, words.size());
      words[at] = static_cast<char>(words[at] ^ 0x10);
    }
    raw.put(words);
    EXPECT_EQ(raw.last_words_of(node_), 0u) << at;  // it would introduce itself
    EXPECT_TRUE(node_.rails.empty()) << at;
  }
  expect_serving();
}

// Promise(security): Messages to UCX's port that the peer did not send, or repeats, have no effect
//   | numbers, tags and a replay window
TEST_F(UcxHostile, MessagesThatThePeerDidNotSendAreDropped) {
  RawPeer raw;
  raw.join(node_, address_);
  const std::string good = raw.sealed(Frame{.type = FrameType::kCancelRead});
  for (size_t bit = 0; bit < 8 * good.size(); bit += 3) {
    if (bit / 8 >= 4 && bit / 8 < 8) continue;  // reserved: nobody looks at them
    std::string changed = good;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    raw.send(changed);
  }
  for (size_t bytes = 1; bytes < good.size(); bytes += 7) raw.send(good.substr(0, bytes));
  // What comes behind them is heard: it takes the rail down, which they have not.
  raw.send(Frame{.type = FrameType::kReadEnd});
  EXPECT_THAT(fate(raw), HasSubstr("answers what was not asked for"));
  expect_serving();
}

// In any order, but each once: one that comes again does nothing again.
TEST_F(UcxHostile, RepeatedMessagesAreDropped) {
  std::vector<char> memory(4096, 'm');
  auto region = node_.regions.add(reinterpret_cast<std::byte*>(memory.data()), memory.size(),
                                  Access::kRemoteReadWrite, {});
  ASSERT_TRUE(region.ok());
  const RemoteRegion remote = node_.regions.describe(**region);
  RawPeer raw;
  raw.join(node_, address_);
  std::string piece(framed::kPieceBytes, '\0');
  framed::encode_piece({0, 8}, piece.data());
  const auto write = [&](uint32_t slot, std::string_view payload) {
    return raw.sealed(Frame{.type = FrameType::kWrite,
                            .flags = framed::kLast,
                            .transfer = {slot, 1},
                            .bytes = 8,
                            .pieces = 1,
                            .region = remote.index,
                            .generation = remote.generation,
                            .key = remote.key,
                            .slice_bytes = 8,
                            .total_bytes = 8},
                      piece + std::string(payload));
  };
  const std::string first = write(1, "11111111");
  const std::string second = write(2, "22222222");
  for (const std::string* message : {&second, &first, &second, &first, &second}) raw.send(*message);
  raw.send(write(3, "33333333"));
  until({&node_}, [&] {
    raw.engine->progress();
    return raw.heard.size() >= 3;
  });
  EXPECT_EQ(node_.landed.size(), 3u);
  EXPECT_EQ(std::string(memory.data(), 8), "33333333");
  EXPECT_TRUE(node_.down.empty());
}

TEST_F(UcxHostile, FramesThatNoPeerSendsTakeTheRailDown) {
  const struct {
    std::function<void(RawPeer&)> send;
    const char* why;
  } rows[] = {
      {[](RawPeer& raw) { raw.send(Frame{.type = FrameType::kWriteAck}); }, "hostile"},
      {[](RawPeer& raw) { raw.send(Frame{.type = FrameType::kReadEnd}); }, "hostile"},
      {[](RawPeer& raw) {
         raw.send(Frame{.type = FrameType::kReadData, .bytes = 100}, "far fewer");
       },
       "its length differs from its header's"},
      {[](RawPeer& raw) {
         raw.send(raw.sealed(std::string(framed::kHeaderBytes + 50, '\x5a'), ""));
       },
       ""},
  };
  for (const auto& row : rows) {
    RawPeer raw;
    raw.join(node_, address_);
    row.send(raw);
    EXPECT_THAT(fate(raw), HasSubstr(row.why)) << &row - rows;
    node_.down.clear();
  }
  expect_serving();
}

}  // namespace
}  // namespace baton::ucx
