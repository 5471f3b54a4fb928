// What a small message costs in system calls, counted where they leave the process.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "tests/tcp/tcp_pair.h"
#include "transport/net/endpoint.h"
#include "transport/tcp/ack_hold.h"
#include "transport/tcp/rail.h"

namespace {
struct Calls {
  uint64_t sends = 0;     // that moved something
  uint64_t receives = 0;  // the same
  uint64_t questions = 0;
  uint64_t polls = 0;
  int socket = -1;  // that was last sent to
};
Calls calls;
}  // namespace

// In place of the C library's, in this program alone.
extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const ssize_t moved = syscall(SYS_sendmsg, fd, message, flags);
  calls.sends += moved > 0 ? 1 : 0;
  calls.socket = fd;
  return moved;
}
extern "C" ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const ssize_t moved = syscall(SYS_recvmsg, fd, message, flags);
  calls.receives += moved > 0 ? 1 : 0;
  return moved;
}
extern "C" int epoll_wait(int fd, epoll_event* events, int most, int timeout) {
  ++calls.polls;
  return static_cast<int>(syscall(SYS_epoll_pwait, fd, events, most, timeout, nullptr, 0));
}
extern "C" int getsockopt(int fd, int level, int name, void* value, socklen_t* size) noexcept {
  ++calls.questions;
  return static_cast<int>(syscall(SYS_getsockopt, fd, level, name, value, size));
}

namespace baton::tcp {
namespace {

// Two nodes whose clock stands still, and messages of 8 bytes between them.
class SmallMessages : public TcpPair {
 protected:
  explicit SmallMessages(const TcpNode::Settings& more = {})
      : a_("a", with(more), kSecret, 0, clock_), b_("b", with(more), kSecret, 0, clock_) {}
  void SetUp() override {
    connect(a_, b_);
    to_b_ = &a_.transfer(Op::kWrite, source_, kAll, b_.share(at_b_), kAll);
    to_a_ = &b_.transfer(Op::kWrite, source_, kAll, a_.share(at_a_), kAll);
  }
  TcpNode::Settings with(const TcpNode::Settings& more) const {
    TcpNode::Settings out = settings();
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  static void post(TcpNode& from, TransferDescriptor& message) {
    ASSERT_TRUE(from.rails[0]->post({&message, 0, 0, 8}, from));
  }
  // Until it has landed, and not one round longer.
  void arrive(TcpNode& from, TransferDescriptor& message, TcpNode& to) {
    const size_t before = to.landed.size();
    post(from, message);
    from.progress();
    until({&to}, [&] { return to.landed.size() > before; });
  }
  void ping_pong(int times) {
    for (int i = 0; i < times; ++i) {
      arrive(a_, *to_b_, b_);
      arrive(b_, *to_a_, a_);
    }
  }

  static constexpr const char* kSecret = "0123456789abcdef";
  static inline const Layout kAll = Layout::contiguous(0, 8);
  ManualClock clock_;
  TcpNode a_, b_;
  std::vector<char> source_ = pattern(8, 1), at_a_ = std::vector<char>(8), at_b_ = at_a_;
  TransferDescriptor* to_b_ = nullptr;
  TransferDescriptor* to_a_ = nullptr;
};

// Promise(tcp): A small message and its answer cost one `sendmsg` and one `recvmsg` per side |
//   acknowledgements ride on the answer; `epoll_wait` in one of 16 rounds
TEST_F(SmallMessages, EachCostsOneSendAndOneReceive) {
  ping_pong(AckHold::kFewest + 1);
  calls = Calls();
  const size_t done = a_.done.size() + b_.done.size();
  constexpr int kTimes = 100;
  ping_pong(kTimes);
  EXPECT_EQ(calls.sends, 2u * kTimes) << "acknowledgements ride on data";
  EXPECT_LE(calls.receives, 2u * kTimes);
  EXPECT_EQ(calls.questions, 0u) << "nobody asks for TCP_INFO, nor for an error just after polling";
  EXPECT_LE(calls.polls, kTimes / 2u) << "each side polls in one of 16 of its rounds";
  EXPECT_GE(calls.polls, 2u * kTimes / 16) << "for all the other sockets";
  EXPECT_EQ(a_.done.size() + b_.done.size() - done, 2u * kTimes) << "each was acknowledged";
  EXPECT_TRUE(a_.down.empty() && b_.down.empty());
}

TEST_F(SmallMessages, AQuietSocketIsPolledAgain) {
  ping_pong(TcpRail::kHotFrom + 1);
  clock_.advance(std::chrono::milliseconds(1));
  calls = Calls();
  constexpr uint64_t kRounds = 100;
  for (uint64_t i = 0; i < kRounds; ++i) b_.progress();
  EXPECT_EQ(calls.polls, kRounds);
}

// What was queued before a reset belongs to transfers that its sender has given up.
TEST_F(SmallMessages, NothingIsReadDirectlyAfterAPause) {
  ping_pong(TcpRail::kHotFrom + 1);
  const size_t before = b_.landed.size();
  post(a_, *to_b_);
  a_.progress();
  a_.rails[0]->close(absl::UnavailableError("lost"), a_);
  clock_.advance(std::chrono::milliseconds(1));
  until({&b_}, [&] { return !b_.down.empty(); });
  EXPECT_EQ(b_.landed.size(), before);
}

// Where nothing follows, the first ones are not held at all.
TEST_F(SmallMessages, AcknowledgementsAreNotHeldWithoutAReason) {
  arrive(a_, *to_b_, b_);
  until({&a_}, [&] { return !a_.done.empty(); });
}

TEST_F(SmallMessages, AnAcknowledgementThatNothingFollowsLeavesByItself) {
  ping_pong(AckHold::kFewest + 1);
  size_t done = a_.done.size();
  arrive(a_, *to_b_, b_);
  EXPECT_FALSE(b_.provider->arm()) << "somebody would sleep on it";
  for (uint32_t i = 0; i <= AckHold::kRounds; ++i) b_.progress();
  until({&a_}, [&] { return a_.done.size() == done + 1; });
  EXPECT_TRUE(b_.provider->arm());
  // From now on data has to follow more often before one is held again.
  done = a_.done.size();
  arrive(a_, *to_b_, b_);
  until({&a_}, [&] { return a_.done.size() == done + 1; });
}

TEST_F(SmallMessages, AnAcknowledgementIsHeldForMicrosecondsOnly) {
  ping_pong(AckHold::kFewest + 1);
  const size_t done = a_.done.size();
  arrive(a_, *to_b_, b_);
  clock_.advance(AckHold::kLongest + std::chrono::microseconds(1));
  b_.progress();
  until({&a_}, [&] { return a_.done.size() == done + 1; });
}

// What is said next waits for what is on its way, not for all that a socket's buffer could hold.
// Promise(tcp): At most 512 KiB unsent bytes are ahead of the next message on a socket |
//   `TCP_NOTSENT_LOWAT`
TEST_F(SmallMessages, BulkDoesNotFillTheSocket) {
  constexpr size_t kBulk = 8 << 20, kSlice = 1 << 20, kSegment = 64 << 10;
  std::vector<char> local = pattern(kBulk, 3), remote(kBulk);
  const Layout all = Layout::contiguous(0, kBulk);
  auto& bulk = a_.transfer(Op::kWrite, local, all, b_.share(remote), all);
  Feeder feeder(a_, bulk, kSlice);
  feeder.feed();
  for (int quiet = 0; quiet < 100; ++quiet) {  // b takes nothing
    if (a_.progress()) quiet = 0;
  }
  int unsent = 0;
  ASSERT_EQ(ioctl(calls.socket, SIOCOUTQNSD, &unsent), 0);
  EXPECT_GT(unsent, 0);
  EXPECT_LE(static_cast<size_t>(unsent), net::kMostUnsent + kSegment);
  until({&a_, &b_}, [&] {
    feeder.feed();
    return feeder.finished();
  });
  EXPECT_EQ(remote, local);
}

// Peers none of whom waits for acknowledgements: tcp.ack_us.
class Unhurried : public SmallMessages {
 protected:
  static constexpr Time kHold = std::chrono::milliseconds(2);
  Unhurried() : SmallMessages({{"tcp.ack_us", "2000"}}) {}
  // Rounds of b without anything to send.
  void idle_rounds(uint32_t rounds) {
    for (uint32_t i = 0; i < rounds; ++i) b_.progress();
  }
};

TEST_F(Unhurried, RoundsOfProgressDoNotSendAnAcknowledgement) {
  ping_pong(AckHold::kFewest + 1);
  const size_t done = a_.done.size();
  arrive(a_, *to_b_, b_);
  clock_.advance(kHold / 2);
  calls = Calls();
  idle_rounds(100);
  EXPECT_EQ(calls.sends, 0u);
  arrive(b_, *to_a_, a_);
  EXPECT_EQ(calls.sends, 1u);
  EXPECT_EQ(a_.done.size(), done + 1) << "it came with the data";
}

TEST_F(Unhurried, SleepsUntilAnAcknowledgementIsDue) {
  ping_pong(AckHold::kFewest + 1);
  const size_t done = a_.done.size();
  arrive(a_, *to_b_, b_);
  idle_rounds(2);
  EXPECT_TRUE(b_.provider->arm()) << "nothing can be done before its time";
  EXPECT_LE(b_.provider->next_timer(), clock_.now() + kHold);
  clock_.advance(kHold + std::chrono::microseconds(1));
  b_.progress();
  until({&a_}, [&] { return a_.done.size() == done + 1; });
}

// Being late now and then costs nobody anything, so it does not end the holding for long.
TEST_F(Unhurried, HoldsAgainSoonAfterOneThatNothingFollowed) {
  for (int late = 0; late < 20; ++late) {
    ping_pong(AckHold::kFewest + 1);
    arrive(a_, *to_b_, b_);
    clock_.advance(kHold + std::chrono::microseconds(1));
    b_.progress();
  }
  ping_pong(AckHold::kFewest + 1);
  calls = Calls();
  constexpr int kTimes = 100;
  ping_pong(kTimes);
  EXPECT_EQ(calls.sends, 2u * kTimes);
}

TEST_F(SmallMessages, AGoodbyeTakesHeldAcknowledgementsAlong) {
  ping_pong(AckHold::kFewest + 1);
  const size_t done = a_.done.size();
  arrive(a_, *to_b_, b_);
  b_.rails[0]->close(absl::CancelledError("enough"), b_);
  until({&a_}, [&] { return !a_.down.empty(); });
  ASSERT_EQ(a_.done.size(), done + 1);
  EXPECT_TRUE(a_.done.back().status.ok()) << a_.done.back().status;
}

}  // namespace
}  // namespace baton::tcp
