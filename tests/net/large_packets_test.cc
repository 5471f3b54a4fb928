// Of a peer that answers, but not to what fills a packet: when that is because large packets get
// lost, and when he is only slow. Over loopback nothing gets lost; what would not have come is not
// sent.
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "tests/manual_clock.h"
#include "tests/net/plain_host.h"
#include "tests/test.h"

namespace baton::net {
namespace {

using testing::HasSubstr;
using LargePackets = Acceptor::LargePackets;

class LargePacketsTest : public testing::TestWithParam<Handshake::Purpose> {
 protected:
  static constexpr int kSegment = 1400;
  static constexpr size_t kVerdict = 36;
  static constexpr Time kPatience = PlainProvider::kPatience;

  LargePacketsTest() : listener_(*listen_on("127.0.0.1", 0, {})) {
    setsockopt(listener_, IPPROTO_TCP, TCP_MAXSEG, &kSegment, sizeof kSegment);
  }
  ~LargePacketsTest() override {
    hang_up();
    ::close(listener_);
  }
  void hang_up() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  void call(LargePackets large_packets) {
    caller_.it.open(large_packets);
    const std::string where = local_of(listener_).text();
    if (GetParam() == Handshake::Purpose::kRail) {
      caller_.provider->connect({.session = 1, .address = where});
    } else {
      ASSERT_TRUE(caller_.provider->query(1, where).ok());
    }
  }
  // Takes the next call; acknowledgements are not held back.
  void take_call() {
    hang_up();
    in_.clear();
    handshake_.emplace(Handshake::Role::kServer, caller_.key,
                       HelloInfo{.uid = WorkerUid::random(), .name = "raw"});
    until({&caller_}, [&] {
      fd_ = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      return fd_ >= 0;
    });
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
  }
  // Takes in what has come, and says what is to be said: `most` bytes of it.
  void answer(size_t most = SIZE_MAX) {
    most = std::min(most, handshake_->to_send().size());
    ASSERT_EQ(::send(fd_, handshake_->to_send().data(), most, MSG_NOSIGNAL),
              static_cast<ssize_t>(most));
    handshake_->sent(most);
  }
  void take_in_the_long_message() {
    until({&caller_}, [&] {
      if (handshake_->padding() == 0) answer();  // the opening
      while (handshake_->wanted() > 0 && take(fd_, in_, handshake_->wanted())) {
        EXPECT_TRUE(handshake_->receive(in_).ok());
        in_.clear();
      }
      return handshake_->padding() > 0 && !handshake_->to_send().empty();
    });
  }
  void wait(Time span) {
    for (Time gone{0}; gone < span; gone += kPatience / 100) {
      clock_.advance(kPatience / 100);
      caller_.settle();
    }
  }
  // All is answered, and the caller content.
  void goes_on() {
    EXPECT_FALSE(hung_up(fd_));
    answer();
    if (GetParam() == Handshake::Purpose::kRail) {
      until({&caller_}, [&] { return !caller_.it.met.empty(); });
      return;
    }
    std::string said(sizeof(uint32_t), '\0');
    said[0] = 7;
    said += "address";
    EXPECT_EQ(::send(fd_, said.data(), said.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(said.size()));
    until({&caller_}, [&] { return caller_.answer != nullptr; });
    EXPECT_EQ(**caller_.answer, "address");
  }

  ManualClock clock_;
  Host caller_{"caller", clock_};
  int listener_, fd_ = -1;
  std::string in_;
  std::optional<Handshake> handshake_;
};

// Everything that was sent to it has arrived: it is busy, and may be as for long as any handshake.
TEST_P(LargePacketsTest, OneThatIsBusyIsWaitedFor) {
  call(LargePackets::kOrSmallSegments);
  take_call();
  take_in_the_long_message();
  wait(kPatience - kPatience / 20);
  goes_on();
  if (caller_.it.last_dial) {
    EXPECT_EQ(caller_.it.last_dial->segment(), 0) << "no packet got lost";
  }
}

// It has had the long message, and says so; its own is not there.
TEST_P(LargePacketsTest, OneWhoseLargePacketsGetLostIsCalledWithSmallerSegments) {
  call(LargePackets::kOrSmallSegments);
  take_call();
  take_in_the_long_message();
  wait(kPatience / 2);
  answer(kVerdict);
  caller_.settle();
  wait(kPatience / 4 - kPatience / 50);
  EXPECT_FALSE(hung_up(fd_)) << "from then on it has a quarter of the patience";
  wait(kPatience / 25);
  ASSERT_TRUE(hung_up(fd_));
  take_call();
  EXPECT_LE(largest_segment(fd_), Dial::kSegments[1]);
  take_in_the_long_message();
  EXPECT_LE(handshake_->padding(), Dial::kSegments[1]);
  goes_on();
}

// What comes behind the long message is not waited for in this way.
TEST_P(LargePacketsTest, OneWhoseLongMessageHasComeIsWaitedFor) {
  call(LargePackets::kOrSmallSegments);
  take_call();
  take_in_the_long_message();
  answer(kVerdict + handshake_->padding());
  caller_.settle();
  wait(kPatience - kPatience / 20);
  goes_on();
}

INSTANTIATE_TEST_SUITE_P(Calls, LargePacketsTest,
                         testing::Values(Handshake::Purpose::kRail, Handshake::Purpose::kQuery),
                         [](const auto& each) {
                           return each.param == Handshake::Purpose::kRail ? "Rail" : "Query";
                         });

using WhereAllMustPass = LargePacketsTest;
TEST_P(WhereAllMustPass, TheReasonIsTold) {
  call(LargePackets::kMustPass);
  take_call();
  take_in_the_long_message();
  answer(kVerdict);
  caller_.settle();
  wait(kPatience / 4 + kPatience / 50);
  EXPECT_TRUE(hung_up(fd_));
  EXPECT_THAT(std::string(caller_.failed.message()), HasSubstr("the MTU of the path"));
}
INSTANTIATE_TEST_SUITE_P(Rail, WhereAllMustPass, testing::Values(Handshake::Purpose::kRail),
                         [](const auto&) { return "Calls"; });

}  // namespace
}  // namespace baton::net
