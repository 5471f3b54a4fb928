// A peer that takes nothing has its share of a worker's transfers, and others have theirs.
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr size_t kAll = 4096;  // WorkerOptions::max_transfers

class Share : public ScriptedPeers {
 protected:
  struct Other {
    HelloInfo who;
    PeerId peer;
    ScriptedRail* rail = nullptr;
  };
  Other meet(const std::string& name) {
    const uint64_t number = ++met_;
    Other other{.who = caller(number, 100 * number)};
    other.who.name = name;
    std::tie(other.peer, other.rail) = up(other.who);
    return other;
  }
  // Until it is refused, in one go: nobody has seen what waits for what.
  size_t flood(PeerId peer, const std::string& notification) {
    for (size_t sent = 0;; ++sent) {
      const auto id = worker_->submit({.peer = peer, .notify = notification, .detached = true});
      if (id.ok()) continue;
      EXPECT_TRUE(absl::IsResourceExhausted(id.status())) << id.status();
      refused_ = std::string(id.status().message());
      return sent;
    }
  }
  // One of each kind goes to the peer, and ends.
  void expect_served(const Other& other) {
    for (const std::string& notification : {std::string(), std::string("words")}) {
      const auto id = worker_->submit({.peer = other.peer, .notify = notification}).value();
      turn();
      report(*other.rail);
      EXPECT_EQ(*worker_->state(id), TransferState::kDone);
      EXPECT_TRUE(worker_->release(id).ok());
    }
  }
  // All that goes at once over the rail is reported, again and again.
  void drain(const Other& other) {
    do {
      report(*other.rail);
    } while (!other.rail->held.empty());
  }

  uint64_t met_ = 0;
  std::string refused_;
};

// Promise(notifications): Waiting notifications hold up no other traffic | they use a queue of
//   their own and a third of the transfers at most
TEST_F(Share, NotificationsThatWaitLeaveTransfersForOthersAndForTheirPeer) {
  const Other deaf = meet("deaf"), other = meet("other");
  const std::string text(8'000, 'x');
  flood(deaf.peer, text);
  turn();
  drain(deaf);  // now it has all that its inbox takes, and what waits stays
  flood(deaf.peer, text);
  turn();
  EXPECT_EQ(worker_->stats().open_transfers, kAll / 3 + 1);
  EXPECT_THAT(refused_, HasSubstr("peer \"deaf\" has its share of the 4096 transfers"));
  EXPECT_THAT(refused_, HasSubstr("1366 with notifications have not ended. They wait until what"));
  EXPECT_THAT(refused_, Not(HasSubstr("ended and wait to be released"))) << "nothing is to release";
  expect_served(other);
  // Its own transfers do not wait for what nobody reads.
  const auto write = worker_->submit({.peer = deaf.peer}).value();
  turn();
  drain(deaf);
  EXPECT_EQ(*worker_->state(write), TransferState::kDone);

  // It reads: there is room again.
  give_credit(*deaf.rail, 4 << 20);
  EXPECT_FALSE(deaf.rail->held.empty());
  drain(deaf);
  EXPECT_TRUE(worker_->notify_detached(deaf.peer, text).ok());
  EXPECT_LT(worker_->stats().open_transfers, kAll / 3 + 1);
}

// Promise(limits): One peer that is slow or stopped holds at most half of the worker's transfers |
//   open transfers are counted per peer at `submit()`
TEST_F(Share, APeerThatIsCalledAgainHoldsHalfOfThem) {
  const Other lost = meet("lost"), other = meet("other");
  lost.rail->lose("cut");
  ASSERT_EQ(worker_->peer_state(lost.peer), PeerState::kReconnecting);
  EXPECT_EQ(flood(lost.peer, ""), kAll / 2);
  EXPECT_THAT(refused_, HasSubstr("2048 of its have not ended. It was lost, and is called again"));
  turn();
  expect_served(other);
  // All that waited for it counts no more when it is given up.
  clock_.advance(milliseconds(6000));
  turn();
  ASSERT_EQ(worker_->peer_state(lost.peer), PeerState::kDown);
  EXPECT_EQ(worker_->stats().open_transfers, 0u);
  EXPECT_EQ(flood(other.peer, ""), kAll / 2);
}

TEST_F(Share, AnyNumberOfPeersThatTakeNothingLeaveSomeForTheNext) {
  std::vector<Other> silent;
  for (size_t i = 1; i <= 20; ++i) {
    silent.push_back(meet("silent"));
    flood(silent.back().peer, "");
    EXPECT_LT(worker_->stats().transfers_submitted, kAll) << i;
  }
  expect_served(meet("other"));
}

TEST_F(Share, ExhaustionErrorsNameTheHolders) {
  const Other busy = meet("busy");
  const size_t open = flood(busy.peer, "");
  // Those that have ended and were not released are nobody's share.
  std::vector<TransferId> ended;
  const Other quick = meet("quick");
  while (ended.size() < kAll - open) {
    const auto id = worker_->submit({.peer = quick.peer}).value();
    ended.push_back(id);
    turn();
    report(*quick.rail);
  }
  EXPECT_EQ(flood(quick.peer, ""), 0u);
  EXPECT_THAT(refused_,
              HasSubstr("all 4096 transfers are in use: 2048 have not ended (the peer with most, "
                        "\"busy\", has 2048), 2048 have ended and wait to be released"));
  for (const TransferId id : ended) EXPECT_TRUE(worker_->release(id).ok());
  EXPECT_TRUE(worker_->submit({.peer = quick.peer, .detached = true}).ok());
}

// An EndCallback submits the next transfer before the ended one's slot is free.
TEST_F(Share, APeerAtItsLimitSubmitsFromAnEndCallback) {
  const Other busy = meet("busy");
  struct Chain {
    Worker& worker;
    PeerId peer;
    absl::Status next = absl::UnknownError("not called");
  } chain{.worker = *worker_, .peer = busy.peer};
  TransferRequest first{.peer = busy.peer, .detached = true};
  first.context = &chain;
  first.on_end = [](void* context, TransferId, const absl::Status&) {
    auto& seen = *static_cast<Chain*>(context);
    seen.next = seen.worker.submit({.peer = seen.peer, .detached = true}).status();
  };
  ASSERT_TRUE(worker_->submit(first).ok());
  turn();
  ASSERT_THAT(busy.rail->held, SizeIs(1));
  const Slice only = busy.rail->held.front();
  flood(busy.peer, "");
  EXPECT_FALSE(worker_->submit({.peer = busy.peer}).ok());
  busy.rail->held.erase(busy.rail->held.begin());
  provider_->sink->slice_done(*busy.rail, only.transfer->id, only.index, absl::OkStatus());
  turn();
  EXPECT_TRUE(chain.next.ok()) << chain.next;
}

}  // namespace
}  // namespace baton
