// Peers of which all rails were lost are called again, by both sides, over every provider that
// reaches them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/log.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {
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
