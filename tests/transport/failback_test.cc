// Peers that are up over a worse provider than both sides have, in the order in which a test says
// so: the better one is called again, and what there is to do goes over it when it answers.
#include "tests/captured_log.h"
#include "tests/test.h"
#include "tests/transport/scripted_worker.h"
#include "transport/internal/messages/control_message.h"

namespace baton {
namespace {

using internal::ControlMessage;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class Failback : public TwoProviders {
 protected:
  Failback() { start({}); }
  void start(SettingValues settings) {
    make_worker(std::move(settings));
    peer_ = *worker_->connect(address());
  }
  void pass(Time time) {
    clock_.advance(time);
    turn();
  }
  // Up over the better one, which is lost: the peer is there again over the other.
  ScriptedRail* fall_back() {
    ScriptedRail* fast = answer(*fast_);
    const uint64_t lost = links_;
    lose(*fast, "unplugged");
    fast_->fail(absl::UnavailableError("still unplugged"));
    ScriptedRail* slow = answer(*slow_);
    settle(*slow, lost);
    return slow;
  }
  // What the worker itself has to say is said, and the peer has closed its end of what was lost.
  void settle(ScriptedRail& rail, uint64_t lost) {
    while (!rail.held.empty()) {
      report(rail);
    }
    const ControlMessage fenced{.kind = ControlMessage::Kind::kFenced, .link = lost};
    const std::string words = fenced.encode();
    slow_->sink->arrived(rail, {.transfer = {0, static_cast<uint32_t>(lost)},
                                .counter_index = CounterTable::kControl,
                                .counter_generation = 1,
                                .increment = 0,
                                .notify = words});
    turn();
  }
  void tell() {
    ASSERT_TRUE(worker_->notify_detached(peer_, "words").ok());
    turn();
  }
};

// Promise(lost): Traffic returns to the better provider after `peer.failback_ms`, without loss or
//   repetition | slices go to the best provider's rails; the others stay as reserve
TEST_F(Failback, WhatThereIsToDoReturnsToTheBetterProvider) {
  ScriptedRail* slow = fall_back();
  ASSERT_NE(slow, nullptr);
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kUp);
  tell();
  ASSERT_THAT(slow->held, SizeIs(1));
  EXPECT_THAT(fast_->calls, IsEmpty());

  pass(seconds(1));
  ASSERT_THAT(fast_->calls, SizeIs(1));
  EXPECT_EQ(fast_->calls.front().resume, Resume::kOurs);
  EXPECT_EQ(fast_->calls.front().address, "f");
  ScriptedRail* fast = answer(*fast_);
  ASSERT_NE(fast, nullptr);
  // New words go there; those that were under way end where they are.
  tell();
  EXPECT_THAT(fast->held, SizeIs(1));
  EXPECT_THAT(slow->held, SizeIs(1));
  slow->report();
  report(*fast);
  EXPECT_EQ(worker_->stats().open_transfers, 0U);
  const std::string route = worker_->explain(peer_);
  EXPECT_THAT(route, AllOf(HasSubstr("peer: fast ["), HasSubstr("slow: kept for when")));
  EXPECT_THAT(route, Not(HasSubstr("still unplugged")));
  // Nobody has heard of any of this but the log.
  int events = 0;
  while (worker_->next_peer_event()) ++events;
  EXPECT_EQ(events, 3);  // up, lost, resumed
  pass(minutes(10));
  EXPECT_THAT(fast_->calls, IsEmpty());
  EXPECT_THAT(slow_->calls, IsEmpty());
}

TEST_F(Failback, FullIsNotLost) {
  ScriptedRail* slow = fall_back();
  pass(seconds(1));
  ScriptedRail* fast = answer(*fast_);
  for (int i = 0; i < 40; ++i) tell();
  EXPECT_THAT(fast->held, SizeIs(32));  // all that it takes
  EXPECT_THAT(slow->held, IsEmpty());
}

// Of the worse provider it is known how quick it is, of the better one not yet.
TEST_F(Failback, WhatTheWorseProviderGivesBackGoesOverTheBetterOne) {
  slow_->slice_bytes = fast_->slice_bytes = 1 << 20;
  ScriptedRail* slow = fall_back();
  std::vector<char> memory(8 << 20);
  const MemoryRegion region = *worker_->register_memory(memory.data(), memory.size());
  const auto id = must(worker_->submit(write_of(region, peer_, who_.uid)));
  const auto write_one = [&] {
    const Slice slice = slow->held.front();
    slow->held.erase(slow->held.begin());
    pass(milliseconds(10));
    slow_->sink->slice_done(*slow, slice.transfer->id, slice.index, absl::OkStatus());
  };
  turn();
  ASSERT_GE(slow->held.size(), 2U);
  write_one();
  turn();
  pass(seconds(1));
  ScriptedRail* fast = answer(*fast_);
  ASSERT_FALSE(slow->held.empty());
  report(*slow, absl::UnavailableError("not by this way"));
  while (!fast->held.empty()) {
    pass(milliseconds(1));
    report(*fast);
  }
  EXPECT_EQ(*worker_->state(id), TransferState::kDone);
}

TEST_F(Failback, LostAgainTheOtherIsThereAtOnce) {
  ScriptedRail* slow = fall_back();
  pass(seconds(1));
  ScriptedRail* fast = answer(*fast_);
  lose(*fast, "unplugged again");
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kUp);
  settle(*slow, links_);
  tell();
  EXPECT_THAT(slow->held, SizeIs(1));
  // It comes and goes, so it is called later than the first time.
  pass(milliseconds(1999));
  EXPECT_THAT(fast_->calls, IsEmpty());
  pass(milliseconds(1));
  ASSERT_THAT(fast_->calls, SizeIs(1));
  ASSERT_NE(answer(*fast_), nullptr);
}

TEST_F(Failback, OneThatHasHeldIsCalledAsSoonAsTheFirstTime) {
  fall_back();
  pass(seconds(1));
  ScriptedRail* fast = answer(*fast_);
  pass(minutes(1));
  lose(*fast, "unplugged again");
  pass(seconds(1));
  EXPECT_THAT(fast_->calls, SizeIs(1));
}

TEST_F(Failback, PausesGrowAndTheLogIsQuiet) {
  CapturedLog log(base::LogLevel::kInfo);
  fall_back();
  log.lines.clear();
  Time pause = seconds(1);
  for (int call = 0; call < 10; ++call) {
    pass(pause - milliseconds(1));
    EXPECT_THAT(fast_->calls, IsEmpty()) << call;
    pass(milliseconds(1));
    ASSERT_THAT(fast_->calls, SizeIs(1)) << call;
    pass(minutes(5));  // an answer may take its time
    ASSERT_THAT(fast_->calls, SizeIs(1)) << call;
    fast_->fail(absl::UnavailableError("still unplugged"));
    turn();
    pause = std::min<Time>(2 * pause, minutes(1));
  }
  EXPECT_THAT(log.lines, testing::ElementsAre(AllOf(HasSubstr("reached over slow"),
                                                    HasSubstr("over fast it does not answer"))));
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kUp);
}

TEST_F(Failback, OneThatDidNotAnswerAtFirstIsCalledToo) {
  fast_->fail(absl::UnavailableError("unplugged"));
  ASSERT_NE(answer(*slow_), nullptr);
  pass(seconds(1));
  ASSERT_THAT(fast_->calls, SizeIs(1));
  EXPECT_NE(answer(*fast_), nullptr);
}

TEST_F(Failback, ARefusalIsNotRetried) {
  fall_back();
  pass(seconds(1));
  ASSERT_THAT(fast_->calls, SizeIs(1));
  fast_->fail(absl::FailedPreconditionError("another network now"));
  pass(minutes(10));
  EXPECT_THAT(fast_->calls, IsEmpty());
}

// Both are lost while the better one is called: that call may be the one that brings the peer back,
// and when it fails the peer is called all the same.
TEST_F(Failback, AllIsLostDuringACall) {
  ScriptedRail* slow = fall_back();
  pass(seconds(1));
  ASSERT_THAT(fast_->calls, SizeIs(1));
  lose(*slow);
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kReconnecting);
  ASSERT_THAT(fast_->calls, SizeIs(2));
  fast_->fail(absl::UnavailableError("unplugged"));
  fast_->fail(absl::UnavailableError("unplugged"));
  turn();
  ASSERT_THAT(slow_->calls, SizeIs(1));
  ASSERT_NE(answer(*slow_), nullptr);
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kUp);
  pass(seconds(2));
  EXPECT_THAT(fast_->calls, SizeIs(1));
}

TEST_F(Failback, CanBeSwitchedOff) {
  start({{"peer.failback_ms", "0"}});
  fall_back();
  pass(minutes(10));
  EXPECT_THAT(fast_->calls, IsEmpty());
}

}  // namespace
}  // namespace baton
