// Credit for notifications: what is sent costs some, and what was read, or never came, gives it
// back.
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"
#include "transport/internal/tables/peer.h"

namespace baton {
namespace {

using std::chrono::milliseconds;
using ::testing::SizeIs;

class Credit : public ScriptedPeers {
 protected:
  static constexpr size_t kText = 60'000;
  static constexpr uint64_t kCost = kText + internal::kNotificationCost;
  static constexpr size_t kFit = internal::kNotificationWindow / kCost;

  Credit() { std::tie(peer_, rail_) = up(caller(9, 100)); }

  TransferId send() {
    const auto id = worker_->notify(peer_, std::string(kText, 'x')).value();
    turn();
    return id;
  }
  // As many as the window takes, all of them delivered.
  void fill() {
    for (size_t i = 0; i < kFit; ++i) {
      send();
      ASSERT_THAT(rail_->held, SizeIs(1)) << i;
      report(*rail_);
    }
  }

  ScriptedRail* rail_ = nullptr;
  PeerId peer_;
};

TEST_F(Credit, IsTakenByWhatIsSentAndOnlyThePeerGivesItBack) {
  fill();
  const TransferId waits = send();
  EXPECT_THAT(rail_->held, SizeIs(0)) << "sent without credit";
  EXPECT_EQ(*worker_->state(waits), TransferState::kActive);
  give_credit(*rail_, kCost / 2);  // with what was left of the window that may not do
  give_credit(*rail_, kCost / 2);
  ASSERT_THAT(rail_->held, SizeIs(1)) << "the peer has given enough";
  report(*rail_);
  EXPECT_EQ(*worker_->state(waits), TransferState::kDone);
  send();
  EXPECT_THAT(rail_->held, SizeIs(0)) << "what waited has cost nothing";
}

TEST_F(Credit, AnUndeliveredNotificationReturnsItsCredit) {
  for (size_t i = 0; i + 1 < kFit; ++i) {
    send();
    report(*rail_);
  }
  const TransferId last = send();
  ASSERT_THAT(rail_->held, SizeIs(1));
  const TransferId waits = send();
  ASSERT_THAT(rail_->held, SizeIs(1));
  ASSERT_TRUE(worker_->cancel(last).ok());
  turn();
  report(*rail_, absl::CancelledError("aborted"));
  EXPECT_EQ(*worker_->state(last), TransferState::kCancelled);
  EXPECT_THAT(rail_->held, SizeIs(1)) << "what was not delivered still costs";
  report(*rail_);
  EXPECT_EQ(*worker_->state(waits), TransferState::kDone);
}

// A peer that knows nothing of credit, or claims not to, is not listened to for ever.
TEST_F(Credit, APeerFarOverItsCreditIsDisconnected) {
  for (size_t i = 0; i < 2 * kFit; ++i) notify(*rail_, std::string(kText, 'x'));
  turn();
  EXPECT_EQ(provider_->closed, nullptr) << "within the window and what may still come back";
  notify(*rail_, std::string(kText, 'x'));
  notify(*rail_, std::string(kText, 'x'));
  turn();
  EXPECT_NE(provider_->closed, nullptr);
}

// What is read while the peer is lost is still owed to it, else it could send less and less.
// Promise(notifications): Credit of a sender that was lost is returned when it is back | it stays
//   owed
TEST_F(Credit, ForWhatWasReadMeanwhileGoesToAPeerThatIsBack) {
  const HelloInfo who = caller(10, 200);
  const auto [peer, rail] = up(who);
  const std::string text(60'000, 'x');
  constexpr size_t kTexts = 20;  // more than a quarter of the window
  for (size_t i = 0; i < kTexts; ++i) notify(*rail, text);
  rail->lose("cut");
  ASSERT_EQ(worker_->peer_state(peer), PeerState::kReconnecting);
  Notification note;
  size_t read = 0;
  while (worker_->next_notification(note)) ++read;
  EXPECT_EQ(read, kTexts);

  clock_.advance(milliseconds(60));
  turn();
  ASSERT_THAT(provider_->calls, SizeIs(1));
  HelloInfo answer = who;
  answer.link = 201;
  ScriptedRail* fresh = provider_->answer(answer);
  ASSERT_NE(fresh, nullptr);
  turn();
  uint64_t given = 0;
  for (const Slice& slice : fresh->held) {
    if (slice.transfer->counter.index == CounterTable::kCredits) given += slice.transfer->increment;
  }
  EXPECT_EQ(given, kTexts * (text.size() + internal::kNotificationCost));
}

}  // namespace
}  // namespace baton
