// Peers that are authenticated and still wrong: hostile frames, and death at every byte.
#include <fcntl.h>

#include "tests/tcp/raw_peer.h"

namespace baton::tcp {
namespace {

TEST_F(TcpPair, HostileFramesCloseTheRailAndNothingElse) {
  TcpNode node("node", settings());
  auto address = node.provider->listen().value();
  std::vector<char> memory(4096, 'x');
  const RemoteRegion region = node.share(memory);
  const framed::Frame read{.type = framed::FrameType::kRead,
                           .transfer = {1, 1},
                           .bytes = 8,
                           .pieces = 1,
                           .region = region.index,
                           .generation = region.generation,
                           .key = region.key};
  framed::Frame oversize = write_frame(region, framed::kMaxPayload + 1);
  framed::Frame middle = write_frame(region, 10);
  middle.slice_offset = 5;
  middle.slice_bytes = middle.total_bytes = 15;
  std::string too_many_reads;
  for (int i = 0; i < 100; ++i) {
    too_many_reads += encoded(read, {{0, 8}});
  }
  const std::vector<std::string> attacks = {
      std::string(framed::kHeaderBytes, '\0'),
      std::string(framed::kHeaderBytes, '\xff'),
      std::string("GET / HTTP/1.1\r\n") + std::string(200, 'a'),
      encoded(oversize, {{0, framed::kMaxPayload + 1}}),
      encoded(write_frame(region, 10), {{0, 9}}, "0123456789"),
      encoded(middle, {{0, 10}}, "0123456789"),
      encoded({.type = framed::FrameType::kWriteAck, .transfer = {1, 1}}),
      encoded({.type = framed::FrameType::kReadData, .transfer = {1, 1}, .bytes = 10}, {},
              "0123456789"),
      encoded({.type = framed::FrameType::kReadEnd, .transfer = {1, 1}}),
      too_many_reads,
  };
  for (size_t i = 0; i < attacks.size(); ++i) {
    RawPeer peer;
    ASSERT_NO_FATAL_FAILURE(peer.connect(node, address));
    ASSERT_TRUE(peer.send(attacks[i]));
    until({&node}, [&] { return node.rails.empty(); });
    EXPECT_TRUE(absl::IsDataLoss(node.down.back())) << node.down.back();
    EXPECT_EQ(memory, std::vector<char>(4096, 'x')) << "attack " << i;
    EXPECT_NE(node.down.back().message().find("raw"), absl::string_view::npos) << node.down.back();
  }
  EXPECT_TRUE(node.landed.empty());
  // Cancelling a read that never was is harmless.
  RawPeer peer;
  ASSERT_NO_FATAL_FAILURE(peer.connect(node, address));
  ASSERT_TRUE(peer.send(encoded({.type = framed::FrameType::kCancelRead, .transfer = {1, 1}})));
  ASSERT_TRUE(peer.send(encoded(write_frame(region, 5), {{7, 5}}, "hello")));
  const std::string ack = peer.receive_frame(node, framed::kHeaderBytes);
  auto frame = framed::decode_header(ack).value();
  EXPECT_EQ(frame.type, framed::FrameType::kWriteAck);
  EXPECT_EQ(frame.code, absl::StatusCode::kOk);
  EXPECT_EQ(std::string(&memory[7], 5), "hello");
}

// A connection that is reset takes what was queued on it along, even where the reset comes while
// the target is in the middle of a round, after it has looked what is ready.
// Promise(tcp): Nothing that was queued before a reset lands after it | the socket's error is read
//   before its data
TEST_F(TcpPair, NothingQueuedBeforeAResetLandsAfterIt) {
  struct Target : TcpNode {
    using TcpNode::TcpNode;
    void arrived(Rail& rail, const Arrival& arrival) override {
      TcpNode::arrived(rail, arrival);
      // Whichever came first, the other one is reset now.
      if (peers[0] != nullptr) peers[memory[0] == '1' ? 1 : 0]->reset();
    }
    const char* memory = nullptr;
    RawPeer* peers[2] = {};
  } node("node", settings());
  auto address = node.provider->listen().value();
  std::vector<char> memory(8192, 'x');
  const RemoteRegion region = node.share(memory);
  RawPeer first, second;
  ASSERT_NO_FATAL_FAILURE(first.connect(node, address));
  ASSERT_NO_FATAL_FAILURE(second.connect(node, address));
  until({&node}, [&] { return node.rails.size() == 2; });
  while (node.progress()) {
  }
  node.memory = memory.data();
  node.peers[0] = &first;
  node.peers[1] = &second;
  const framed::Frame write = write_frame(region, 4096);
  ASSERT_TRUE(second.send(encoded(write, {{4096, 4096}}, std::string(4096, '2'))));
  ASSERT_TRUE(first.send(encoded(write, {{0, 4096}}, std::string(4096, '1'))));
  until({&node}, [&] { return node.rails.size() == 1; });
  const bool one = memory[0] == '1';
  EXPECT_EQ(std::string(memory.data(), 4096), std::string(4096, one ? '1' : 'x'));
  EXPECT_EQ(std::string(memory.data() + 4096, 4096), std::string(4096, one ? 'x' : '2'));
  EXPECT_EQ(node.landed.size(), 1u);
}

// The node has called the peer, and has asked it for one transfer of these 32 bytes.
void ask(TcpNode& node, RawPeer& peer, Op op, std::vector<char>& local,
         const TransferDescriptor*& asked) {
  const auto listener = net::listen_on("127.0.0.1", 0, {}).value();
  node.provider->connect({.session = 1, .address = net::local_of(listener).text()});
  ASSERT_NO_FATAL_FAILURE(peer.accept(node, listener));
  ::close(listener);
  auto& t =
      node.transfer(op, local, Layout::contiguous(0, 32),
                    {.key = 1, .size = 32, .index = 1, .generation = 1}, Layout::contiguous(0, 32));
  ASSERT_TRUE(node.rails[0]->post({&t, 0, 0, 32}, node));
  asked = &t;
}

// "Unknown" is what a rail says of its slices when it is lost: then the target is asked what had
// landed. A target that answers so is refusing, and nobody waits for more.
TEST_F(TcpPair, ARefusalIsNotTakenForALostRail) {
  TcpNode node("node", settings());
  RawPeer peer;
  std::vector<char> local(32, 'l');
  const TransferDescriptor* t = nullptr;
  ASSERT_NO_FATAL_FAILURE(ask(node, peer, Op::kWrite, local, t));
  ASSERT_FALSE(peer.receive_frame(node, framed::kHeaderBytes + framed::kPieceBytes, 32).empty());
  ASSERT_TRUE(peer.send(encoded({.type = framed::FrameType::kWriteAck,
                                 .code = absl::StatusCode::kUnknown,
                                 .transfer = t->id,
                                 .text = 4},
                                {}, "what")));
  until({&node}, [&] { return !node.done.empty(); });
  EXPECT_TRUE(absl::IsInternal(node.done[0].status)) << node.done[0].status;
  EXPECT_EQ(node.done[0].status.message(), "what");
  EXPECT_EQ(node.rails.size(), 1u);
}

// Ends a read without having sent its bytes.
TEST_F(TcpPair, ReadEndWithoutDataIsNotBelieved) {
  TcpNode node("node", settings());
  RawPeer peer;
  std::vector<char> local(32, 'l');
  const TransferDescriptor* t = nullptr;
  ASSERT_NO_FATAL_FAILURE(ask(node, peer, Op::kRead, local, t));
  peer.receive_frame(node, framed::kHeaderBytes + framed::kPieceBytes);
  ASSERT_TRUE(peer.send(encoded({.type = framed::FrameType::kReadEnd, .transfer = t->id})));
  until({&node}, [&] { return node.rails.empty(); });
  EXPECT_TRUE(absl::IsUnavailable(node.done.at(0).status));
}

}  // namespace
}  // namespace baton::tcp
