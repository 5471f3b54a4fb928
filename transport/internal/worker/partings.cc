// Peers that are disconnected: all transfers of both sides end first, and are fenced; then the
// rails close.
//
// The side that parts stops its own transfers and waits for their ends. Then it asks the peer to do
// the same (kPart), which, when nothing of its own is open any more, closes the connection: its
// goodbye comes behind all that it sent, and says that nothing lands there any more. Where both
// ask, each knows from the other's question that nothing of it is open. A goodbye that is lost with
// its rail is found out by calling again: the session is over there, or no worker listens there any
// more. A peer whose version of the protocol does not know the question is not asked.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {

std::shared_ptr<absl::Status> Sessions::begin_disconnect(Peer& peer, Time timeout) {
  core_.transfers.take_submissions();
  if (peer.state == PeerState::kDown) return peer.parted;
  const absl::Status why = absl::UnavailableError("this side closed the connection");
  begin_parting(peer, timeout, why);
  std::shared_ptr<absl::Status> over = peer.parted;
  if (peer.state == PeerState::kConnecting) {
    disconnect(peer, why);
  } else if (timeout <= Time::zero()) {
    give_up_parting(peer);
  }
  do {
    core_.closing.run();
    core_.transfers.finish_stopped();
  } while (settle_partings());
  core_.wakeups.rouse();
  core_.wakeups.wake();
  return over;
}

void Sessions::begin_parting(Peer& peer, Time timeout, const absl::Status& why) {
  const Time now = core_.clock.now();
  const Time give_up_at = now + std::min(timeout, patience_);
  if (!peer.parting) {
    peer.parting.emplace();
    peer.parting->why = why;
    parting_.push_back(peer.id());
  }
  peer.parting->give_up_at = std::min(peer.parting->give_up_at, give_up_at);
  if (peer.parted == nullptr) peer.parted = std::make_shared<absl::Status>();
  set_timer(peer);
}

// From inside a provider, so its transfers are stopped when that has returned.
void Sessions::part_asked(Peer& peer) {
  begin_parting(peer, kNever,
                absl::UnavailableError(absl::StrCat(peer.name, " closed the connection")));
  peer.parting->heard = true;
}

// A step with each of them; false when all wait for something.
bool Sessions::tend_partings() {
  bool any = false;
  for (size_t i = 0; i < parting_.size(); ++i) {
    Peer* peer = core_.peers.find(parting_[i]);
    if (peer == nullptr || !peer->parting || peer->state == PeerState::kDown) {
      parting_[i--] = parting_.back();
      parting_.pop_back();
      continue;
    }
    Parting& parts = *peer->parting;
    if (!std::exchange(parts.begun, true)) {
      core_.transfers.stop_all(*peer, parts.why);
      any = true;
    } else if (peer->open > 0) {
      continue;
    } else if (parts.heard) {
      parts.agreed = true;
      disconnect(*peer, parts.why);
      any = true;
    } else if (peer->protocol < kPartingProtocol) {
      // It would take the question for nonsense. It hears that the connection is closed.
      disconnect(*peer, parts.why);
      any = true;
    } else if (!std::exchange(parts.told, true)) {
      core_.outbox.say(*peer, {.kind = ControlMessage::Kind::kPart});
      any = true;
    }
  }
  return any;
}

bool Sessions::settle_partings() {
  if (parting_.empty() || !tend_partings()) return false;
  core_.closing.run();
  core_.transfers.finish_stopped();
  return true;
}

void Sessions::give_up_parting(Peer& peer) {
  const Parting parts = *peer.parting;
  const std::string there =
      peer.open > 0
          ? absl::StrFormat(
                " (%u of ours waited for it): bytes of writes that were on their way may "
                "land there",
                peer.open)
          : std::string(": ours have ended; its own transfers may still move bytes there");
  peer_down(peer,
            absl::DeadlineExceededError(absl::StrCat(
                peer.name, " did not confirm in time that its transfers have ended", there,
                " until it learns of the end. Nothing lands or is read here any more, except by a "
                "process of this machine that is stopped in the middle of a copy over shm")));
  close_rails(peer, absl::CancelledError(parts.why.message()));
}

// `why`: what ended the connection. Whether anything of it can still move.
void Sessions::note_parted(Peer& peer, const absl::Status& why) {
  if (peer.parted == nullptr) peer.parted = std::make_shared<absl::Status>();
  const bool met = peer.state == PeerState::kUp || peer.state == PeerState::kReconnecting;
  const bool agreed = peer.parting && peer.parting->agreed;
  if (met && peer.parting && peer.open == 0 && peer.protocol < kPartingProtocol) {
    *peer.parted = absl::UnavailableError(absl::StrFormat(
        "%s speaks version %u of the protocol, which has no message to end a session: our "
        "transfers "
        "have ended and nothing lands or is read here any more, but its own transfers may move "
        "bytes there until it notices the end; upgrade it",
        peer.name, peer.protocol));
  } else if (met && !agreed && !absl::IsAborted(why) && !peer.redial.gone) {
    *peer.parted = absl::IsDeadlineExceeded(why)
                       ? why
                       : absl::UnavailableError(absl::StrCat(
                             "the connection to ", peer.name,
                             " was lost before it confirmed the end, so bytes of writes "
                             "that were on their way may land there until it notices: ",
                             why.message()));
  }
}

}  // namespace baton::internal
