// A worker's peers: their rows, and what the worker does when connections come, go and come back,
// in the order in which a test says so.
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/peer_table.h"

namespace baton {
namespace {

using internal::ControlMessage;
using internal::PeerTable;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(PeerTable, IsFullWhenAllAreInUse) {
  PeerTable table;
  for (uint32_t i = 0; i < PeerTable::kMost; ++i) ASSERT_NE(table.add(), nullptr);
  EXPECT_EQ(table.add(), nullptr);
  table.set_state(table[7], PeerState::kDown);
  EXPECT_EQ(table.add(), &table[7]);
  EXPECT_EQ(table.add(), nullptr);
  EXPECT_FALSE(table.knows({PeerTable::kMost, 1}));
}

TEST(PeerTable, FindsASessionByItsInitiator) {
  PeerTable table;
  internal::Peer* ours = table.add();
  internal::Peer* theirs = table.add();
  const WorkerUid uid = WorkerUid::random();
  ours->uid = theirs->uid = uid;
  ours->dialled = true;
  table.set_session(*ours, 5);
  table.set_session(*theirs, 5);
  EXPECT_EQ(table.of_session(uid, 5, true), ours);
  EXPECT_EQ(table.of_session(uid, 5, false), theirs);
  EXPECT_EQ(table.of_session(WorkerUid::random(), 5, true), nullptr);
  table.set_session(*ours, 6);
  EXPECT_EQ(table.of_session(uid, 5, true), nullptr);
  EXPECT_EQ(table.of_session(uid, 6, true), ours);
  // Forgotten with its row, and the row's new peer has none of it.
  table.set_state(*ours, PeerState::kDown);
  for (size_t i = 0; i < PeerTable::kRemembered; ++i) {
    table.set_state(*table.add(), PeerState::kDown);
  }
  EXPECT_EQ(table.add(), ours);
  EXPECT_EQ(table.of_session(uid, 6, true), nullptr);
}

// The other side may lose a rail before this one has heard of it. A call that brings only such a
// rail has failed, and there is another.
TEST_F(ScriptedPeers, ARailThatWasFencedBeforeItWasHeardOfIsNotTheEndOfTheCalls) {
  const HelloInfo who = caller(9, 100);
  const auto [peer, rail] = up(who);
  say(*rail, {.kind = ControlMessage::Kind::kFence, .link = 222});
  rail->report();
  rail->lose("cut");
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kReconnecting);

  clock_.advance(milliseconds(60));  // the side that was called waits a little
  turn();
  ASSERT_THAT(provider_->calls, SizeIs(1));
  HelloInfo answer = who;
  answer.link = 222;
  EXPECT_EQ(provider_->answer(answer), nullptr);
  EXPECT_TRUE(absl::IsUnavailable(provider_->closed_why)) << provider_->closed_why;
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kReconnecting);

  turn();
  EXPECT_THAT(provider_->calls, SizeIs(0));  // not at once
  clock_.advance(milliseconds(30));
  turn();
  ASSERT_THAT(provider_->calls, SizeIs(1));
  answer.link = 333;
  EXPECT_NE(provider_->answer(answer), nullptr);
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
}

// What had been sent over a rail that the other side has lost is asked about: a call by which it
// was to come, and that is late, brings none of it any more.
TEST_F(ScriptedPeers, ACallThatWasFencedBeforeItCameIsRefused) {
  const HelloInfo who = caller(9, 100);
  const auto [peer, rail] = up(who);
  say(*rail, {.kind = ControlMessage::Kind::kFence, .link = 222});
  call_in(who, 222);
  EXPECT_NE(provider_->closed, nullptr);
  EXPECT_TRUE(absl::IsUnavailable(provider_->closed_why)) << provider_->closed_why;
  provider_->closed = nullptr;
  call_in(who, 333);
  EXPECT_EQ(provider_->closed, nullptr);
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
}

// An adapter may have told the peer that something arrived over a rail that its program has not
// looked at yet: that counts, though the peer asks about the rail first.
TEST_F(ScriptedPeers, WhatCameOverARailThatIsAskedAboutBeforeItIsSeenCounts) {
  HelloInfo who = caller(9, 100);
  ScriptedRail* const rail = up(who).second;
  turn();
  rail->report();
  who.link = 222;
  provider_->then = [&] {
    ScriptedRail& late = provider_->call_in(who);
    provider_->then = [&] { notify(late, "I was here"); };
    const ControlMessage question{
        .kind = ControlMessage::Kind::kFence, .link = 222, .slices = {{{1, generation_ + 2}, 0}}};
    ask(*rail, question);
  };
  turn();
  Notification got;
  ASSERT_TRUE(worker_->next_notification(got));
  EXPECT_EQ(got.payload, "I was here");
  EXPECT_NE(provider_->closed, nullptr) << "and the rail is closed before the answer";
  ASSERT_THAT(rail->held, SizeIs(1));
  const auto answer = ControlMessage::decode(rail->held[0].transfer->notify).value();
  EXPECT_EQ(answer.kind, ControlMessage::Kind::kFenced);
  EXPECT_THAT(answer.landed, testing::ElementsAre(internal::Fate::kLanded));
}

// What has no name but its number counts by how many came in the same epoch of its rail.
TEST_F(ScriptedPeers, WhatIsOnlyNumberedIsKnownByTheCountOfItsEpoch) {
  const HelloInfo who = caller(9, 100);
  ScriptedRail* const rail = up(who).second;
  ScriptedRail* const lost = &call_in(who, 222);
  lost->count = internal::Ordinal{.epoch = 3, .number = 5};
  lose(*lost);
  rail->report();
  using internal::kNoSlot;
  say(*rail, {.kind = ControlMessage::Kind::kFence,
              .link = 222,
              .slices = {{{kNoSlot, 3}, 4}, {{kNoSlot, 3}, 5}, {{kNoSlot, 2}, 4}}});
  turn();
  ASSERT_THAT(rail->held, SizeIs(1));
  const auto answer = ControlMessage::decode(rail->held[0].transfer->notify).value();
  using internal::Fate;
  EXPECT_THAT(answer.landed, testing::ElementsAre(Fate::kLanded, Fate::kNever, Fate::kUnknown));
}

// The first call of a session may be lost after the caller's last word, before it was heard here.
TEST_F(ScriptedPeers, ASessionThatIsResumedButWasNeverBegunBegins) {
  HelloInfo who = caller(9, 100);
  who.resume = Resume::kOurs;
  const PeerId peer = up(who).first;
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
  worker_->disconnect(peer, Time::zero()).IgnoreError();
  turn();
  while (worker_->next_peer_event()) {
  }
  provider_->call_in(who);  // what was here, and is over, does not begin again
  turn();
  EXPECT_FALSE(worker_->next_peer_event());
  // Nor does what may have been here and is forgotten.
  for (size_t i = 0; i < PeerTable::kRemembered; ++i) {
    worker_->disconnect(up(caller(1, 1)).first, Time::zero()).IgnoreError();
    turn();
    while (worker_->next_peer_event()) {
    }
  }
  HelloInfo other = caller(9, 100);
  other.resume = Resume::kOurs;
  provider_->closed = nullptr;
  call_in(other);
  EXPECT_NE(provider_->closed, nullptr);
  EXPECT_THAT(provider_->closed_why.message(), HasSubstr("session is over"));
  EXPECT_FALSE(worker_->next_peer_event());
}

TEST_F(ScriptedPeers, APeerThatRefusesWhenItIsCalledAgainIsDownAndSaysWhy) {
  const auto [peer, rail] = up(caller(9, 100));
  rail->lose("cut");
  clock_.advance(milliseconds(60));
  turn();
  ASSERT_THAT(provider_->calls, SizeIs(1));
  provider_->sink->connect_failed(provider_->calls.front().session,
                                  absl::PermissionDeniedError("the cluster keys differ"));
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kDown);
  const std::string why(worker_->peer_status(peer).message());
  EXPECT_THAT(why, HasSubstr("the cluster keys differ"));
  EXPECT_THAT(why, testing::Not(HasSubstr("nobody")));
}

// The first rail may go before the next one is heard of: what came over it counts.
TEST_F(ScriptedPeers, WhatCameOverTheFirstRailCountsThoughItWentBeforeTheSecondCame) {
  const CounterId counter = *worker_->allocate_counter();
  const RemoteCounter remote = worker_->remote_counter(counter);
  const HelloInfo who = caller(9, 100);
  const auto [peer, first] = up(who);
  const auto half = [&](ScriptedRail& rail, uint32_t slice) {
    provider_->sink->arrived(rail, {.transfer = {3, 1},
                                    .slice = slice,
                                    .slice_bytes = 50,
                                    .total_bytes = 100,
                                    .counter_index = remote.index,
                                    .counter_generation = remote.generation,
                                    .increment = 1});
  };
  half(*first, 0);
  first->lose("cut");
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kReconnecting);
  ScriptedRail& second = call_in(who, 101);
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
  EXPECT_EQ(worker_->counter_value(counter), 0U);
  half(second, 1);
  EXPECT_EQ(worker_->counter_value(counter), 1U);
}

// What rails have been asked to carry: questions about lost rails, by the rail they ask about.
std::vector<uint64_t> questions(const ScriptedRail& rail) {
  std::vector<uint64_t> asked;
  for (const Slice& slice : rail.held) {
    if (slice.transfer->counter.index != CounterTable::kControl) continue;
    const auto message = ControlMessage::decode(slice.transfer->notify);
    if (message.ok() && message->kind == ControlMessage::Kind::kFence) {
      asked.push_back(message->link);
    }
  }
  return asked;
}

// The answer about a lost rail may be lost with the rail that carried it, though the peer has heard
// that it arrived (an adapter says so; its completion is then never read). What waits for it asks
// again: over the rails that are left, and over the first one of a peer that is back.
class LostAnswers : public ScriptedPeers {
 protected:
  // A transfer whose rail, 100, was lost, and a question about that which has been delivered over
  // rail 101.
  void SetUp() override {
    who_ = caller(9, 100);
    std::tie(peer_, first_) = up(who_);
    second_ = another(101);
    third_ = another(102);
    transfer_ = worker_->submit({.peer = peer_, .notify = "words"}).value();
    turn();
    ASSERT_THAT(first_->held, SizeIs(1));
    lose(*first_);
    ScriptedRail* const asked = questions(*second_).empty() ? third_ : second_;
    if (asked == third_) std::swap(second_, third_);
    ASSERT_THAT(questions(*second_), testing::ElementsAre(100));
    report(*second_);
    EXPECT_EQ(*worker_->state(transfer_), TransferState::kActive);
  }
  ScriptedRail* another(uint64_t link) { return &call_in(who_, link); }
  // The answer comes: nothing had landed. The transfer goes on.
  void answer_over(ScriptedRail& rail) {
    rail.report();
    say(rail,
        {.kind = ControlMessage::Kind::kFenced, .link = 100, .landed = {internal::Fate::kNever}});
    EXPECT_THAT(rail.held, testing::Contains(testing::Field(&Slice::transfer, notify_is("words"))));
    report(rail);
    EXPECT_EQ(*worker_->state(transfer_), TransferState::kDone);
  }
  static testing::Matcher<const TransferDescriptor*> notify_is(const std::string& words) {
    return testing::Pointee(testing::Field(&TransferDescriptor::notify, words));
  }

  HelloInfo who_;
  PeerId peer_;
  ScriptedRail *first_ = nullptr, *second_ = nullptr, *third_ = nullptr;
  TransferId transfer_;
};

// Promise(lost): An answer about a lost rail that is itself lost is asked for again | questions are
//   repeated when a rail is lost and when the peer is back
TEST_F(LostAnswers, AreAskedForAgainOverARailThatIsLeft) {
  lose(*second_);
  EXPECT_THAT(questions(*third_), testing::UnorderedElementsAre(100, 101));
  answer_over(*third_);
}

TEST_F(LostAnswers, AreAskedForAgainWhenThePeerIsBack) {
  lose(*third_);
  second_->report();  // the questions had arrived
  turn();
  lose(*second_);
  ASSERT_EQ(worker_->peer_state(peer_), PeerState::kReconnecting);
  ScriptedRail* const fresh = another(103);
  ASSERT_EQ(worker_->peer_state(peer_), PeerState::kUp);
  EXPECT_THAT(questions(*fresh), testing::UnorderedElementsAre(100, 101, 102));
  answer_over(*fresh);
}

// The questions were on a rail that was lost too. That they had arrived says nothing of the
// answers, and the peer may take the lost connection for alive and answer over it.
TEST_F(LostAnswers, AreAskedForAgainWhereTheQuestionHadArrived) {
  lose(*third_);
  ASSERT_THAT(questions(*second_), testing::UnorderedElementsAre(100, 102));
  third_ = another(103);
  lose(*second_);
  EXPECT_THAT(questions(*third_), testing::UnorderedElementsAre(100, 101, 102));
  answer_over(*third_);
}

// The target cannot say whether a question of ours had arrived: it is asked as if it had not.
TEST_F(LostAnswers, AreAskedForAgainWhereTheFateOfTheQuestionIsNotKnown) {
  lose(*third_);
  third_ = another(103);
  lose(*second_);
  say(*third_, {.kind = ControlMessage::Kind::kFenced,
                .link = 101,
                .landed = {internal::Fate::kUnknown, internal::Fate::kUnknown}});
  EXPECT_THAT(questions(*third_), testing::UnorderedElementsAre(100, 101, 102));
  answer_over(*third_);
}

// However often a peer is lost before it has answered, the questions that wait do not pile up.
TEST_F(LostAnswers, AreAskedForOnceAtATime) {
  second_->lose("cut");
  third_->lose("cut");
  for (uint64_t link = 110; link < 130; ++link) {
    ScriptedRail* const fresh = another(link);
    const std::vector<uint64_t> asked = questions(*fresh);
    EXPECT_EQ(std::set<uint64_t>(asked.begin(), asked.end()).size(), asked.size());
    lose(*fresh);
  }
}

// Both sides agree on which of several rails is the first, so that answers go where questions came.
TEST_F(ScriptedPeers, RailsOfOneProviderAreInTheOrderOfTheirNumbersHoweverTheyCameUp) {
  for (const bool lowest_first : {true, false}) {
    SCOPED_TRACE(lowest_first);
    const uint64_t session = lowest_first ? 9 : 10;
    const HelloInfo who = caller(session, lowest_first ? 100 : 200);
    const auto [peer, first] = up(who);
    ScriptedRail& second = call_in(who, lowest_first ? 200 : 100);
    ASSERT_TRUE(worker_->notify_detached(peer, "a question").ok());
    turn();
    const ScriptedRail& lowest = lowest_first ? *first : second;
    const ScriptedRail& other = lowest_first ? second : *first;
    EXPECT_THAT(lowest.held, SizeIs(1));
    EXPECT_THAT(other.held, SizeIs(0));
  }
}

// A slot has a new transfer, and the word that asked for the end of its last one is still there.
// Promise(transfers): `cancel()` ends the transfer that it names or none | the request carries the
//   handle's generation
TEST_F(ScriptedPeers, ACancelNeverHitsTheNextTransferOfItsSlot) {
  const auto [met, rail] = up(caller(9, 100));
  const PeerId peer = met;
  const auto submit = [&] { return worker_->submit({.peer = peer, .notify = "words"}).value(); };
  const TransferId one = submit();
  turn();
  report(*rail);
  ASSERT_EQ(*worker_->state(one), TransferState::kDone);
  ASSERT_TRUE(worker_->cancel(one).ok());  // nobody has heard of that yet
  ASSERT_TRUE(worker_->release(one).ok());
  const TransferId next = submit();
  ASSERT_EQ(next.slot, one.slot);
  turn();
  EXPECT_EQ(*worker_->state(next), TransferState::kActive);
  EXPECT_FALSE(worker_->progress()) << "whom it named is looked for again and again";
  report(*rail);
  EXPECT_EQ(*worker_->state(next), TransferState::kDone);
}

TEST_F(ScriptedPeers, NothingIsLateThatMayTakeAlmostForEver) {
  clock_.advance(std::chrono::hours(1));
  const auto [peer, rail] = up(caller(9, 100));
  const auto id =
      worker_->submit({.peer = peer, .notify = "words", .timeout = kNever - Time(1)}).value();
  turn();
  EXPECT_EQ(*worker_->state(id), TransferState::kActive);
  int looks = 0;
  EXPECT_TRUE(worker_->wait_until([&] { return ++looks > 3; }, kNever - Time(1)).ok());
  report(*rail);
  EXPECT_TRUE(worker_->wait(id, kNever - Time(1)).ok());
}

// Each peer's times are its own, and 10,000 that are lost at once are all called again and given up
// in time.
TEST_F(ScriptedPeers, TenThousandThatAreLostAtOnceAreAllCalledAgain) {
  constexpr size_t kPeers = 10'000;
  std::vector<ScriptedRail*> rails;
  for (size_t i = 0; i < kPeers; ++i) rails.push_back(&provider_->call_in(caller(i + 1, i + 1)));
  turn();
  std::set<std::pair<uint32_t, uint32_t>> peers;
  while (auto event = worker_->next_peer_event()) {
    peers.emplace(event->peer.index, event->peer.generation);
  }
  ASSERT_THAT(peers, SizeIs(kPeers));
  EXPECT_EQ(worker_->stats().peers_up, kPeers);

  // One of them has something to do, and only that one does it.
  const PeerId one{peers.begin()->first, peers.begin()->second};
  ASSERT_TRUE(worker_->notify_detached(one, "you alone").ok());
  turn();
  size_t posted = 0;
  for (ScriptedRail* rail : rails) posted += rail->held.size();
  EXPECT_EQ(posted, 1U);

  for (ScriptedRail* rail : rails) rail->lose("the switch is gone");
  turn();
  EXPECT_EQ(worker_->stats().peers_up, 0U);
  clock_.advance(milliseconds(60));
  turn();
  EXPECT_THAT(provider_->calls, SizeIs(kPeers));
  // A half of them come back.
  std::set<uint64_t> back;
  for (size_t i = 0; i < kPeers / 2; ++i) {
    HelloInfo who;
    who.uid = provider_->calls.front().expected.uid;
    who.session = provider_->calls.front().session;
    who.link = 100'000 + i;
    ASSERT_NE(provider_->answer(who), nullptr);
  }
  EXPECT_EQ(worker_->stats().peers_up, kPeers / 2);
  clock_.advance(std::chrono::seconds(6));
  turn();
  size_t down = 0;
  for (const auto& [index, generation] : peers) {
    down += worker_->peer_state({index, generation}) == PeerState::kDown;
  }
  EXPECT_EQ(down, kPeers / 2);
}

}  // namespace
}  // namespace baton
