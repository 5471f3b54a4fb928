// What a worker keeps for its peers does not grow with what they say, nor with time.
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/peer.h"
#include "transport/internal/tables/peer_table.h"

namespace baton {
namespace {

using internal::ControlMessage;
using ::testing::HasSubstr;

class Bounds : public ScriptedPeers {
 protected:
  // The peer has lost its last rail, and calls again with this one.
  ScriptedRail* again(HelloInfo who, ScriptedRail& lost, uint64_t link) {
    lose(lost);
    return &call_in(std::move(who), link);
  }
  std::vector<PeerEvent> unread() {
    std::vector<PeerEvent> out;
    while (auto event = worker_->next_peer_event()) out.push_back(*std::move(event));
    return out;
  }
};

// Promise(limits): Unread peer events cost at most 8 entries per known peer | the newest replaces
//   the one before and counts it (`PeerEvent::missed`)
TEST_F(Bounds, UnreadEventsOfAPeerCollapseIntoTheLast) {
  const HelloInfo who = caller(9, 100);
  ScriptedRail* rail = &call_in(who);
  constexpr uint32_t kTimes = 50;
  for (uint32_t i = 1; i <= kTimes; ++i) rail = again(who, *rail, 100 + i);
  lose(*rail, "the last cut");
  const std::vector<PeerEvent> events = unread();
  ASSERT_EQ(events.size(), internal::kUnreadEvents);
  EXPECT_EQ(events.front().kind, PeerEvent::Kind::kUp);
  EXPECT_EQ(events.back().kind, PeerEvent::Kind::kLost);
  EXPECT_THAT(std::string(events.back().why.message()), HasSubstr("the last cut"));
  EXPECT_EQ(events.back().missed, 2 + 2 * kTimes - internal::kUnreadEvents);
  // Each is told again when somebody reads.
  call_in(who, 1000);
  const std::vector<PeerEvent> more = unread();
  ASSERT_EQ(more.size(), 1u);
  EXPECT_EQ(more.front().kind, PeerEvent::Kind::kResumed);
  EXPECT_EQ(more.front().missed, 0u);
}

TEST_F(Bounds, EventsOfPeersThatAreForgottenGoWithThem) {
  constexpr uint64_t kPeers = 3000;
  for (uint64_t i = 1; i <= kPeers; ++i) {
    ScriptedRail& rail = provider_->call_in(caller(i, i));
    worker_->progress();
    worker_->progress();
    rail.close(absl::AbortedError("it leaves"), *provider_->sink);
    worker_->progress();
  }
  const std::vector<PeerEvent> events = unread();
  EXPECT_LE(events.size(), 2 * (internal::PeerTable::kRemembered + 2));
  EXPECT_EQ(events.back().kind, PeerEvent::Kind::kDown);
}

// However many have gone since. Read, they are forgotten like others.
TEST_F(Bounds, APeerWithUnreadNotificationsIsNotForgotten) {
  const size_t peers = internal::PeerTable::kRemembered + 100;
  const auto come_and_go = [&](bool say) {
    for (uint64_t i = 1; i <= peers; ++i) {
      ScriptedRail& rail = provider_->call_in(caller(i, i));
      worker_->progress();
      worker_->progress();
      if (say) notify(rail, "of " + std::to_string(i));
      rail.close(absl::AbortedError("it leaves"), *provider_->sink);
      worker_->progress();
    }
  };
  come_and_go(true);
  std::map<std::pair<uint32_t, uint32_t>, size_t> came;  // by index and generation
  for (const PeerEvent& event : unread()) {
    came[{event.peer.index, event.peer.generation}] += event.name == "caller";
  }
  Notification note;
  for (uint64_t i = 1; i <= peers; ++i) {
    ASSERT_TRUE(worker_->next_notification(note));
    EXPECT_EQ(note.payload, "of " + std::to_string(i));
    const size_t told = came[{note.peer.index, note.peer.generation}];
    EXPECT_EQ(told, 2u) << "it came, and went";
  }
  EXPECT_FALSE(worker_->next_notification(note));
  come_and_go(false);
  EXPECT_EQ(worker_->peer_status(note.peer).code(), absl::StatusCode::kNotFound);
}

TEST_F(Bounds, APeerThatAsksAndTakesNoAnswersIsClosed) {
  const auto [peer, rail] = up(caller(9, 100));
  uint64_t asked = 0;
  while (worker_->peer_state(peer) == PeerState::kUp && asked < 4 * internal::kMostUnsaid) {
    say(*rail, {.kind = ControlMessage::Kind::kFence, .link = 1000 + ++asked});
  }
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kDown);
  EXPECT_GE(asked, internal::kMostUnsaid);
  EXPECT_THAT(std::string(worker_->peer_status(peer).message()),
              HasSubstr("does not read the answers"));
}

// What waits to be said is not said twice.
TEST_F(Bounds, AQuestionThatIsRepeatedIsAnsweredOnce) {
  const auto [peer, rail] = up(caller(9, 100));
  for (uint32_t i = 0; i < 2 * internal::kMostUnsaid; ++i) {
    say(*rail, {.kind = ControlMessage::Kind::kFence, .link = 1000});
  }
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
}

TEST_F(Bounds, APeerThatNeverSaysWhatCameOverItsLostRailsIsClosed) {
  const HelloInfo who = caller(9, 100);
  auto [peer, rail] = up(who);
  uint64_t link = 100;
  while (worker_->peer_state(peer) == PeerState::kUp && link < 3 * internal::kMostLostRails) {
    notify(*rail, "a word");
    lose(*rail);
    if (worker_->peer_state(peer) == PeerState::kDown) break;
    rail = &call_in(who, ++link);
  }
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kDown);
  EXPECT_GE(link, internal::kMostLostRails);
  EXPECT_THAT(std::string(worker_->peer_status(peer).message()), HasSubstr("does not say"));
}

TEST_F(Bounds, APeerThatAsksForStagedChunksAndTakesNoAnswersIsClosed) {
  const auto [peer, rail] = up(caller(9, 100));
  std::string words;
  uint32_t asked = 0;
  for (; worker_->peer_state(peer) == PeerState::kUp && asked < 10'000; ++asked) {
    internal::StagingMessage{.kind = internal::StagingMessage::Kind::kRelease, .chunk = {asked, 1}}
        .encode(words);
    provider_->sink->arrived(*rail, {.transfer = {3, ++generation_},
                                     .counter_index = CounterTable::kStaging,
                                     .counter_generation = 1,
                                     .notify = words});
    turn();
  }
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kDown);
  EXPECT_GE(asked, 1000u);
  EXPECT_THAT(std::string(worker_->peer_status(peer).message()),
              HasSubstr("does not read the answers"));
}

// Each session may leave its window unread; sessions come and go.
// Promise(limits): Unread notifications of departed peers are at most 64 MiB; beyond that new peers
//   are refused, and none is lost | bytes are counted when a peer leaves and when they are read
TEST_F(Bounds, UnreadNotificationsOfDepartedPeersBlockNewPeers) {
  const std::string text(60'000, 'x');
  const size_t fit = internal::kNotificationWindow / (text.size() + internal::kNotificationCost);
  uint64_t sessions = 0;
  for (; sessions < 100; ++sessions) {
    ScriptedRail& rail = provider_->call_in(caller(1 + sessions, 1 + sessions));
    provider_->closed = nullptr;
    turn();
    if (provider_->closed == &rail) break;
    for (size_t i = 0; i < fit; ++i) notify(rail, text);
    rail.close(absl::AbortedError("it leaves"), *provider_->sink);
    turn();
  }
  EXPECT_LT(sessions, 20u);
  EXPECT_THAT(std::string(provider_->closed_why.message()), HasSubstr("does not read"));
  Notification note;
  size_t read = 0;
  while (worker_->next_notification(note)) read += note.payload == text;
  EXPECT_EQ(read, sessions * fit) << "what had arrived was lost";
  unread();
  up(caller(1000, 1000));
}

}  // namespace
}  // namespace baton
