// How a worker parts with a peer that says what a test says: in which order, and what it waits for.
#include "tests/fails_with.h"
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"
#include "transport/internal/messages/control_message.h"

namespace baton {
namespace {

using internal::ControlMessage;
using ::testing::SizeIs;

class ScriptedPartings : public ScriptedPeers {
 protected:
  // A transfer of ours that the rail has, and of which nothing is known.
  std::pair<PeerId, ScriptedRail*> with_something_open() {
    const auto met = up(caller(9, 100));
    EXPECT_TRUE(worker_->notify_detached(met.first, "words").ok());
    turn();
    EXPECT_THAT(met.second->held, SizeIs(1));
    return met;
  }
};

// The question says that nothing of ours is open: the peer may use its memory when it has heard it.
TEST_F(ScriptedPartings, ThePeerIsAskedWhenNothingOfOursIsOpen) {
  const auto [peer, rail] = with_something_open();
  worker_->begin_disconnect(peer);
  turn();
  ASSERT_THAT(rail->held, SizeIs(1)) << "what is open, and no question yet";
  EXPECT_EQ(rail->held[0].transfer->notify, "words");
  report(*rail, absl::CancelledError("as asked"));
  ASSERT_THAT(rail->held, SizeIs(1)) << "the question";
  const auto asked = ControlMessage::decode(rail->held[0].transfer->notify).value();
  EXPECT_EQ(asked.kind, ControlMessage::Kind::kPart);
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
}

// Its end of the connection says that nothing of ours is open any more.
TEST_F(ScriptedPartings, TheAskedSideClosesOnceIdle) {
  const auto [peer, rail] = with_something_open();
  say(*rail, {.kind = ControlMessage::Kind::kPart});
  EXPECT_EQ(provider_->closed, nullptr) << "closed while a transfer was open";
  EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
  EXPECT_FALSE(worker_->notify_detached(peer, "more").ok() && rail->held.size() > 1)
      << "what is submitted now does not go out";
  report(*rail, absl::CancelledError("as asked"));
  ASSERT_EQ(worker_->peer_state(peer), PeerState::kDown);
  EXPECT_TRUE(absl::IsCancelled(provider_->closed_why)) << provider_->closed_why;
  EXPECT_TRUE(worker_->disconnect(peer).ok()) << "both knew that nothing was open";
}

// A worker of version 4 would take the question for nonsense and lose the rail.
// Promise(disconnect): A peer that speaks an older wire version gets no message that it does not
//   know | the handshake tells the common version
TEST_F(ScriptedPeers, OneOfAnOlderVersionIsNotAskedToPart) {
  for (const uint16_t protocol : {kLowestProtocol, kHighestProtocol}) {
    SCOPED_TRACE(protocol);
    HelloInfo who = caller(protocol, 100);
    who.protocol = protocol;
    const auto [peer, rail] = up(who);
    ASSERT_TRUE(worker_->notify_detached(peer, "words").ok());
    turn();
    worker_->begin_disconnect(peer);
    turn();
    rail->report(absl::CancelledError("as asked"));
    provider_->closed = nullptr;
    turn();
    if (protocol < kPartingProtocol) {
      EXPECT_EQ(provider_->closed, rail) << "ours has ended, and it is told of the end as before";
      EXPECT_TRUE(absl::IsCancelled(provider_->closed_why)) << provider_->closed_why;
      ASSERT_EQ(worker_->peer_state(peer), PeerState::kDown);
      EXPECT_THAT(worker_->disconnect(peer), fails_with(Code::kUnavailable, {"version 4"}));
      EXPECT_EQ(worker_->next_peer_event()->kind, PeerEvent::Kind::kDown);
    } else {
      EXPECT_EQ(provider_->closed, nullptr);
      ASSERT_THAT(rail->held, SizeIs(1)) << "the question";
      EXPECT_EQ(worker_->peer_state(peer), PeerState::kUp);
    }
  }
}

}  // namespace
}  // namespace baton
