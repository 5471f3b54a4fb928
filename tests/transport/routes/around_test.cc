// A peer whose best route does not reach some of its regions: those go another way, which the peer
// is called over, and everything else stays where it is.
#include "tests/fails_with.h"
#include "tests/test.h"
#include "tests/transport/scripted_worker.h"

namespace baton {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr uint32_t kReached = 1;
constexpr uint32_t kUnreached = 2;

// A peer that is up over the fast one.
class Around : public TwoProviders {
 protected:
  Around() {
    make_worker({});
    local_ = *worker_->register_memory(memory_.data(), memory_.size(), Access::kLocal);
    fast_->unreached = {kUnreached};
  }
  void connect() {
    peer_ = *worker_->connect(address());
    fast_rail_ = answer(*fast_);
  }
  TransferId write(uint32_t region) {
    const TransferId id = *worker_->submit(write_of(local_, peer_, who_.uid, region));
    turn();
    return id;
  }

  std::array<std::byte, 4096> memory_{};
  MemoryRegion local_;
  ScriptedRail* fast_rail_ = nullptr;
};

// Promise(memory): A region that the best provider cannot reach goes over the next; only that
//   region does | the peer is also dialled over worse providers
TEST_F(Around, WhatIsNotReachedGoesAnotherWayAndNothingElseDoes) {
  connect();
  const TransferId around = write(kUnreached);
  EXPECT_THAT(fast_rail_->held, IsEmpty());
  ASSERT_THAT(slow_->calls, SizeIs(1));
  EXPECT_EQ(slow_->calls[0].resume, Resume::kOurs);
  write(kReached);
  EXPECT_THAT(fast_rail_->held, SizeIs(1)) << "what is reached waits for nothing";

  ScriptedRail* slow_rail = answer(*slow_);
  ASSERT_NE(slow_rail, nullptr);
  ASSERT_THAT(slow_rail->held, SizeIs(1));
  report(*slow_rail);
  EXPECT_TRUE(worker_->status(around).ok()) << worker_->status(around);
  write(kUnreached);
  EXPECT_THAT(slow_rail->held, SizeIs(1));
  write(kReached);
  EXPECT_THAT(fast_rail_->held, SizeIs(2));
  EXPECT_THAT(slow_->calls, IsEmpty());
  EXPECT_THAT(worker_->explain(peer_),
              HasSubstr("slow: for memory that fast does not reach: fast does not get there"));
}

TEST_F(Around, WhereNoOtherWayIsTheReasonsAreSaid) {
  connect();
  for (int round = 0; round < 2; ++round) {  // the next one is worth another call
    const TransferId id = write(kUnreached);
    ASSERT_THAT(slow_->calls, SizeIs(1));
    slow_->fail(absl::UnavailableError("no cable"));
    turn();
    EXPECT_THAT(worker_->status(id), fails_with(Code::kFailedPrecondition,
                                                {"fast does not get there", "slow: no cable"}));
  }
  EXPECT_EQ(worker_->peer_state(peer_), PeerState::kUp);
}

// A rail that loses its way to a region gives its slices back.
TEST_F(Around, WhatIsNotReachedAnyMoreGoesOnElsewhere) {
  connect();
  const TransferId id = write(kReached);
  fast_->unreached = {kReached};
  report(*fast_rail_, absl::UnavailableError("not any more"));
  EXPECT_THAT(fast_rail_->held, IsEmpty());
  ASSERT_THAT(slow_->calls, SizeIs(1));
  ScriptedRail* slow_rail = answer(*slow_);
  ASSERT_THAT(slow_rail->held, SizeIs(1));
  report(*slow_rail);
  EXPECT_TRUE(worker_->status(id).ok()) << worker_->status(id);
}

TEST_F(Around, ATransferWithoutARouteEndsLikeAnyOther) {
  connect();
  const TransferId cancelled = write(kUnreached);
  const TransferId lost = write(kUnreached);
  EXPECT_TRUE(worker_->cancel(cancelled).ok());
  turn();
  EXPECT_TRUE(absl::IsCancelled(worker_->status(cancelled)));
  ASSERT_THAT(slow_->calls, SizeIs(1));
  fast_rail_->close(absl::AbortedError("goodbye"), *fast_->sink);
  turn();
  EXPECT_TRUE(absl::IsUnavailable(worker_->status(lost))) << worker_->status(lost);
}

// The rail it went by is lost: it is called again, and the transfer does not go where it cannot.
TEST_F(Around, TheOtherWayIsFoundAgain) {
  connect();
  const TransferId id = write(kUnreached);
  ScriptedRail* slow_rail = answer(*slow_);
  ASSERT_THAT(slow_rail->held, SizeIs(1));
  clock_.advance(seconds(5));
  slow_rail->report(absl::UnavailableError("unplugged"));
  slow_->sink->rail_down(*slow_rail, absl::UnavailableError("unplugged"));
  turn();
  ASSERT_THAT(slow_->calls, SizeIs(1));
  slow_rail = answer(*slow_);
  ASSERT_THAT(slow_rail->held, SizeIs(1));
  report(*slow_rail);
  EXPECT_TRUE(worker_->status(id).ok()) << worker_->status(id);
}

// A peer that may be reached by one provider alone (require) closes what else comes, at once.
TEST_F(Around, APeerThatClosesAtOnceIsNotRetriedForEver) {
  connect();
  const TransferId id = write(kUnreached);
  ScriptedRail* slow_rail = answer(*slow_);
  ASSERT_THAT(slow_rail->held, SizeIs(1));
  slow_rail->report(absl::UnavailableError("not wanted"));
  slow_->sink->rail_down(*slow_rail, absl::UnavailableError("not wanted"));
  turn();
  EXPECT_THAT(slow_->calls, IsEmpty());
  EXPECT_TRUE(absl::IsFailedPrecondition(worker_->status(id))) << worker_->status(id);
}

TEST_F(Around, ARailThatIsNotWantedIsClosed) {
  peer_ = *worker_->connect(address(), "fast");
  fast_rail_ = answer(*fast_);
  who_.resume = Resume::kTheirs;
  who_.link = ++links_;
  const ScriptedRail& called = slow_->call_in(who_);
  turn();
  EXPECT_TRUE(slow_->is_closed(&called));
  const TransferId id = write(kUnreached);
  EXPECT_THAT(slow_->calls, IsEmpty());
  EXPECT_THAT(std::string(worker_->status(id).message()), HasSubstr("require=fast"));
}

// One that called is called back over what it has, whatever it came by.
TEST_F(Around, TheCallerIsCalledBack) {
  who_.session = 7;
  who_.link = ++links_;
  who_.address = address();
  fast_rail_ = &fast_->call_in(who_);
  turn();
  const std::optional<PeerEvent> up = worker_->next_peer_event();
  ASSERT_TRUE(up.has_value());
  peer_ = up->peer;
  write(kUnreached);
  ASSERT_THAT(slow_->calls, SizeIs(1));
  EXPECT_EQ(slow_->calls[0].resume, Resume::kTheirs);
  EXPECT_EQ(slow_->calls[0].session, 7u);
}

}  // namespace
}  // namespace baton
