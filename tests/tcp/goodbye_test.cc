// How connections end: what a side said before its goodbye is read by the other, whatever that one
// sends meanwhile; bytes of transfers that end with the connection are not.
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "tests/tcp/raw_peer.h"
#include "transport/tcp/socket.h"

namespace baton::tcp {
namespace {

constexpr size_t kLastBytes = 4096;
constexpr const char* kWhy = "enough";
const RemoteRegion kSomewhere{.key = 1, .size = kLastBytes, .index = 1, .generation = 1};

class Goodbye : public TcpPair {
 protected:
  void SetUp() override {
    auto address = node_.provider->listen().value();
    ASSERT_NO_FATAL_FAILURE(peer_.connect(node_, address));
    while (node_.progress()) {
    }
  }
  // The node writes to the peer, which has it, unread.
  void write(size_t bytes) {
    local_.assign(kLastBytes, 'l');
    auto& t = node_.transfer(Op::kWrite, local_, Layout::contiguous(0, bytes), kSomewhere,
                             Layout::contiguous(0, bytes));
    ASSERT_TRUE(node_.rails[0]->post({&t, 0, 0, bytes}, node_));
    const auto unread = [&] {
      int there = 0;
      EXPECT_EQ(ioctl(peer_.fd(), FIONREAD, &there), 0);
      return there;
    };
    const int before = unread();
    until({&node_}, [&] { return unread() > before; });
  }
  // A write by the peer, to the node's memory.
  std::string frame() {
    return encoded(write_frame(region_, kLastBytes), {{0, kLastBytes}},
                   std::string(kLastBytes, 'p'));
  }
  void close_node() { node_.rails[0]->close(absl::CancelledError(kWhy), node_); }

  TcpNode node_{"node", settings()};
  RawPeer peer_;
  std::vector<char> memory_ = std::vector<char>(kLastBytes, 'x'), local_;
  RemoteRegion region_ = node_.share(memory_);
};

// Promise(disconnect): What a worker said before it shut down is read by its peers | it ends its
//   connections before it closes them
TEST_F(Goodbye, WhatThePeerSaidBeforeItsEndIsReadThoughItDidNotReadOurs) {
  ASSERT_NO_FATAL_FAILURE(write(100));
  ASSERT_TRUE(peer_.send(frame()));
  peer_.end();
  peer_.close();  // with our write unread in it: the kernel sends a reset behind the end
  until({&node_}, [&] { return node_.rails.empty(); });
  EXPECT_EQ(node_.landed.size(), 1u);
  EXPECT_EQ(memory_, std::vector<char>(kLastBytes, 'p'));
}

// Sending first, for a socket with much unread is sent to between two reads.
TEST(EndedSocket, TakesNothingAndLosesNothing) {
  const auto listener = net::listen_on("127.0.0.1", 0, {}).value();
  const int peer = net::dial(net::local_of(listener).text());
  const auto poller = *net::Poller::create();
  Socket socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC), *poller);
  ASSERT_TRUE(socket.watch(nullptr).ok());
  char bytes[100] = {};
  iovec at{.iov_base = bytes, .iov_len = sizeof bytes};
  msghdr message{};
  message.msg_iov = &at;
  message.msg_iovlen = 1;
  ASSERT_EQ(socket.send(message, kNever), 100);
  ASSERT_EQ(::send(peer, "the last words", 14, MSG_NOSIGNAL), 14);
  ::shutdown(peer, SHUT_WR);
  ::close(peer);  // with 100 bytes unread
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(socket.send(message, kNever), -EAGAIN);
    poller->poll();
    EXPECT_TRUE(socket.can_receive());
  }
  EXPECT_EQ(socket.receive(message, kNever), 14);
  EXPECT_TRUE(socket.can_receive());
  EXPECT_EQ(socket.receive(message, kNever), 0);
  ::close(listener);
}

TEST_F(Goodbye, WhatWeSaidReachesThePeerThoughWeDidNotReadAll) {
  ASSERT_TRUE(peer_.send(frame()));
  until({&node_}, [&] { return node_.landed.size() == 1; });
  ASSERT_NO_FATAL_FAILURE(write(0));  // a counter, not acknowledged
  ASSERT_TRUE(peer_.send(frame()));   // comes too late
  close_node();
  EXPECT_NE(peer_.error(), ECONNRESET);
  const auto next = [&](size_t text = 0) {
    const size_t head = framed::kHeaderBytes;
    return framed::decode_header(peer_.receive_frame(node_, head + text).substr(0, head));
  };
  const auto ack = next().value();
  EXPECT_EQ(ack.type, framed::FrameType::kWriteAck);
  const auto counter = next().value();
  EXPECT_EQ(counter.type, framed::FrameType::kWrite);
  const auto goodbye = next(std::strlen(kWhy)).value();
  EXPECT_EQ(goodbye.type, framed::FrameType::kGoodbye);
}

TEST_F(Goodbye, BytesOfATransferThatEndsWithTheConnectionAreForgotten) {
  ASSERT_NO_FATAL_FAILURE(write(100));
  close_node();
  EXPECT_EQ(peer_.error(), ECONNRESET);
}

}  // namespace
}  // namespace baton::tcp
