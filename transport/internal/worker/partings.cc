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
#include "transport/base/log.h"
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

// Peers of which all rails were lost are called again, by both sides, over every provider that
// reaches them.

namespace {

constexpr Time kFirstPause = std::chrono::milliseconds(10);
constexpr Time kLongestPause = std::chrono::seconds(1);
// The side that was called lets the other one begin.
constexpr Time kCourtesy = std::chrono::milliseconds(50);

}  // namespace

void Sessions::peer_lost(Peer& peer, const absl::Status& why) {
  if (redial_ == Time::zero()) return peer_down(peer, why);
  const Time now = core_.clock.now();
  Redial& again = peer.redial;
  again.calling = false;
  again.hopeless.clear();
  if (again.give_up_at == kNever) {
    again.give_up_at = now + redial_;
    again.pause = kFirstPause;
    again.call_at = peer.dialled ? now : now + kCourtesy;
  } else {  // it was back, and did not say a word
    again.call_at = now + again.pause;
    again.pause = std::min(2 * again.pause, kLongestPause);
  }
  if (peer.address.providers.empty()) again.call_at = kNever;  // it never said where it listens
  peer.back.call_at = kNever;
  core_.peers.set_state(peer, PeerState::kReconnecting);
  set_timer(peer);
  --core_.stats.peers_up;
  ++core_.stats.peers_lost;
  peer.why = why;
  base::log_event(base::LogLevel::kWarning, "%s: lost peer %s: %s; calling it again for %.1f s",
                  core_.self.name, peer.name, why.message(),
                  std::chrono::duration<double>(again.give_up_at - now).count());
  core_.inbox.push_event({PeerEvent::Kind::kLost, peer.id(), peer.name, why, peer.uid});
}

// Its first new rail is up.
void Sessions::peer_resumed(Peer& peer) {
  ++core_.stats.peers_resumed;
  peer.redial.calling = false;
  peer.why = absl::OkStatus();
  // As loud as the loss was.
  base::log_event(base::LogLevel::kWarning, "%s: peer resumed: %s", core_.self.name, explain(peer));
  core_.inbox.push_event(
      {PeerEvent::Kind::kResumed, peer.id(), peer.name, absl::OkStatus(), peer.uid});
  for (LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) rail.asked_at = core_.clock.now();
  }
  core_.outbox.owe(peer);
  core_.lost_rails.ask_again(peer);
  core_.lost_rails.ask_about_lost_rails(peer);
  // With nothing to ask, whether it still knows this session.
  if (peer.lost_rails.empty()) core_.outbox.say(peer, {.kind = ControlMessage::Kind::kFence});
}

// When something has to be done about the peer although nothing is heard of it.
Time Sessions::due(const Peer& peer) const {
  const Time parts = peer.parting ? peer.parting->give_up_at : kNever;
  if (peer.state == PeerState::kReconnecting) {
    const Redial& again = peer.redial;
    return std::min(parts,
                    again.calling ? again.give_up_at : std::min(again.give_up_at, again.call_at));
  }
  if (peer.state != PeerState::kUp) return kNever;
  Time due = std::min(parts, peer.back.call_at);
  for (const LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) due = std::min(due, rail.asked_at + patience_);
  }
  return due;
}

void Sessions::set_timer(Peer& peer) {
  const Time at = due(peer);
  if (at >= peer.timer) return;
  peer.timer = at;
  timers_.emplace_back(at, peer.id());
  std::push_heap(timers_.begin(), timers_.end(), kLater);
}

void Sessions::start(Time redial, Time patience) {
  redial_ = redial;
  patience_ = patience;
}

bool Sessions::progress_sessions(Time now) {
  bool any = false;
  while (!timers_.empty() && timers_.front().first <= now) {
    const auto [at, id] = timers_.front();
    std::pop_heap(timers_.begin(), timers_.end(), kLater);
    timers_.pop_back();
    Peer* peer = core_.peers.find(id);
    if (peer == nullptr || peer->timer != at) continue;
    peer->timer = kNever;
    if (due(*peer) <= now) {
      any = true;
      if (peer->parting && peer->parting->give_up_at <= now) {
        give_up_parting(*peer);
      } else if (peer->state == PeerState::kReconnecting) {
        call_again(*peer, now);
      } else if (peer->back.call_at <= now) {
        core_.other_routes.call_better(*peer);
      } else {
        check_answers(*peer, now);
      }
    }
    set_timer(*peer);
  }
  return any;
}

// Finds peers that do not answer: an adapter acknowledges for a stopped process, and a dead host
// sends nothing.
void Sessions::check_answers(Peer& peer, Time now) {
  for (LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) rail.asked_at = now;
  }
  close_rails(peer, absl::UnavailableError(absl::StrFormat(
                        "%s did not say within %.1f s what had come over a lost rail "
                        "(peer.answer_ms)",
                        peer.name, std::chrono::duration<double>(patience_).count())));
}

void Sessions::call_again(Peer& peer, Time now) {
  Redial& again = peer.redial;
  if (now >= again.give_up_at) {
    const absl::Status why = peer.why;
    return peer_down(peer, absl::UnavailableError(absl::StrFormat(
                               "%s; it could not be reached again within %.1f s (peer.redial_ms)%s",
                               why.message(), std::chrono::duration<double>(redial_).count(),
                               peer.notes.empty() ? "" : absl::StrCat(": ", peer.notes.back()))));
  }
  again.calling = true;
  again.hopeless.clear();
  again.gone = false;
  peer.notes.clear();
  peer.untried.clear();
  core_.routes.plan_routes(peer);
}

// No route of this round led to the peer.
void Sessions::round_over(Peer& peer) {
  Redial& again = peer.redial;
  again.calling = false;
  if (!again.hopeless.empty()) {
    return peer_down(
        peer, absl::UnavailableError(absl::StrCat(peer.why.message(), "; ", again.hopeless)));
  }
  again.call_at = core_.clock.now() + again.pause;
  again.pause = std::min(2 * again.pause, kLongestPause);
  set_timer(peer);
}

}  // namespace baton::internal
