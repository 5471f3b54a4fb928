// Rails that were lost, and peers that are called again.
//
// When a rail is lost, some of our slices on it may have landed, and bytes of others may still lie
// in buffers on the way. Before one of them is sent again the peer closes its end of that rail, so
// that nothing more comes over it, and says which had landed (its Arrivals know; of those that have
// no name there, how many the rail had counted): those are done, the others go on over another
// rail. Nothing lands twice, and nothing late.
//
// When the last rail is lost the peer is called again, by both sides, over every provider that
// reaches it. The session goes on: transfers, counters and credits are of the peer, not of its
// rails.
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
constexpr size_t kMostFenced = 256;

}  // namespace

LostRail& WorkerCore::lost_rail(Peer& peer, uint64_t link) {
  const auto lost = std::find_if(peer.lost_rails.begin(), peer.lost_rails.end(),
                                 [&](const LostRail& rail) { return rail.link == link; });
  return lost != peer.lost_rails.end() ? *lost : peer.lost_rails.emplace_back(link);
}

void WorkerCore::unsettled(Peer& peer, uint64_t link, const SliceName& name,
                           const std::optional<Ordinal>& number) {
  LostRail& rail = lost_rail(peer, link);
  rail.unsettled.push_back(name);
  rail.named.push_back(!number ? name : SliceName{{kNoSlot, number->epoch}, number->number});
  ++slots[name.transfer.slot].unsettled;
}

void WorkerCore::settle(const SliceName& name, Fate fate) {
  TransferSlot* slot = slots.find(name.transfer);
  if (slot == nullptr || slot->unsettled == 0) return;
  --slot->unsettled;
  if (fate == Fate::kUnknown) {
    transfers.stop(
        name.transfer.slot, TransferState::kFailed,
        absl::AbortedError("it is not known whether the counter was raised: the peer does not "
                           "remember the rail that was lost"));
    return transfers.maybe_finish(name.transfer.slot);
  }
  const bool landed = fate == Fate::kLanded;
  if (landed) {
    ++slot->landed;
    stats.receipts += !slot->control;
  }
  Peer* peer = find_peer(slot->peer);
  if (landed && slot->control && peer != nullptr) {
    // What was asked is known to have arrived, of what was answered to it nothing.
    if (LostRail* asked = asked_by(*peer, *slot); asked != nullptr) {
      asked->asked_at = kNever;
      ask_about_lost_rails(*peer);
    }
  }
  if (landed || slot->verdict != TransferState::kActive || peer == nullptr) {
    transfers.maybe_finish(name.transfer.slot);
    return;
  }
  ++stats.slices_moved;
  slot->again.push_back(name.slice);
  if (!slot->queued) dispatcher.enqueue(*peer, name.transfer.slot);
}

// The peer is down, and nobody can be asked any more.
void WorkerCore::settle_all(Peer& peer, const absl::Status& why) {
  const std::vector<LostRail> lost = std::move(peer.lost_rails);
  peer.lost_rails.clear();
  for (const LostRail& rail : lost) {
    for (const SliceName& name : rail.unsettled) {
      TransferSlot* slot = slots.find(name.transfer);
      if (slot == nullptr || slot->unsettled == 0) continue;
      --slot->unsettled;
      transfers.stop(name.transfer.slot, TransferState::kFailed, why);
      transfers.maybe_finish(name.transfer.slot);
    }
  }
}

// Also where nothing of ours was on it: the peer may not have noticed, and wait for what it sent.
void WorkerCore::ask_about_lost_rails(Peer& peer) {
  if (peer.state != PeerState::kUp) return;
  for (LostRail& rail : peer.lost_rails) {
    if (!rail.gone || rail.asked_at != kNever) continue;
    rail.asked_at = clock.now();
    rail.heard = false;
    outbox.say(peer,
               {.kind = ControlMessage::Kind::kFence, .link = rail.link, .slices = rail.named});
  }
  set_timer(peer);
}

// A rail was lost: an answer may have been on it, although the peer has heard that it arrived. A
// question that has not arrived goes on by itself, as every transfer does, and is not repeated.
void WorkerCore::ask_again(Peer& peer) {
  for (LostRail& rail : peer.lost_rails) {
    if (rail.heard) rail.asked_at = kNever;
  }
}

// The lost rail that words of our own ask about, if that is not known yet.
LostRail* WorkerCore::asked_by(Peer& peer, const TransferSlot& slot) {
  if (slot.descriptor.counter.index != CounterTable::kControl) return nullptr;
  const auto words = ControlMessage::decode(slot.descriptor.notify);
  if (!words.ok() || words->kind != ControlMessage::Kind::kFence) return nullptr;
  for (LostRail& rail : peer.lost_rails) {
    if (rail.link == words->link && rail.asked_at != kNever) return &rail;
  }
  return nullptr;
}

// From inside a provider, so what closes rails waits until that has returned.
void WorkerCore::hear(Peer& peer, Rail& rail, std::string_view words) {
  absl::StatusOr<ControlMessage> message = ControlMessage::decode(words);
  if (!message.ok()) {
    closing.close_later(peer.id(), &rail, message.status());
    return;
  }
  if (message->kind == ControlMessage::Kind::kFenced) return on_fenced(peer, *message);
  if (message->kind == ControlMessage::Kind::kPart) return part_asked(peer);
  if (peer.unsaid >= kMostUnsaid) {
    closing.close_later(peer.id(), &rail,
                        absl::InvalidArgumentError("the peer asks again and again about rails that "
                                                   "were lost, and takes no answers"));
    return;
  }
  questions.emplace_back(peer.id(), *std::move(message));
}

void WorkerCore::on_fenced(Peer& peer, const ControlMessage& answer) {
  const auto lost = std::find_if(
      peer.lost_rails.begin(), peer.lost_rails.end(),
      [&](const LostRail& rail) { return rail.link == answer.link && rail.asked_at != kNever; });
  if (lost == peer.lost_rails.end()) return;  // a mere sign of life
  const LostRail rail = std::move(*lost);
  peer.lost_rails.erase(lost);
  for (size_t i = 0; i < rail.unsettled.size(); ++i) {
    settle(rail.unsettled[i], i < answer.landed.size() ? answer.landed[i] : Fate::kNever);
  }
}

void WorkerCore::note_counted(Peer& peer, uint64_t link, const Rail& rail) {
  const auto* counting = dynamic_cast<const CountingRail*>(&rail);
  const auto counted = counting != nullptr ? counting->counted() : std::nullopt;
  if (!counted) return;
  if (peer.counted.size() == kMostFenced) peer.counted.erase(peer.counted.begin());
  peer.counted.emplace_back(link, *counted);
}

Fate WorkerCore::fate_of(const Peer& peer, uint64_t link, const SliceName& name) {
  if (name.transfer.slot != kNoSlot) {
    return peer.arrivals.has(name.transfer, name.slice) ? Fate::kLanded : Fate::kNever;
  }
  for (const auto& [of, counted] : peer.counted) {
    if (of != link || counted.epoch != name.transfer.generation) continue;
    return static_cast<int32_t>(name.slice - counted.number) < 0 ? Fate::kLanded : Fate::kNever;
  }
  return Fate::kUnknown;
}

// A rail may have come up since its provider was looked at in this round, and have brought what its
// peer's adapter knows to have arrived, before the peer lost it and asked about it.
void WorkerCore::look_for_asked_rails() {
  for (size_t i = 0; i < questions.size(); ++i) {
    const Peer* peer = find_peer(questions[i].first);
    const uint64_t link = questions[i].second.link;
    if (peer == nullptr || link == 0) continue;
    if (std::any_of(peer->rails.begin(), peer->rails.end(),
                    [&](const RailState& rail) { return rail.link == link; })) {
      continue;
    }
    for (auto& provider : providers) provider->progress(*this);
    return;
  }
}

bool WorkerCore::answer_questions() {
  if (questions.empty()) return false;
  look_for_asked_rails();
  const auto asked = std::move(questions);
  questions.clear();
  answering = true;
  for (const auto& each : asked) {
    const ControlMessage& question = each.second;
    Peer* peer = find_peer(each.first);
    if (peer == nullptr || peer->state == PeerState::kDown) continue;
    const auto state = std::find_if(
        peer->rails.begin(), peer->rails.end(),
        [&](const RailState& rail) { return question.link != 0 && rail.link == question.link; });
    if (state != peer->rails.end()) {
      Rail* rail = state->rail.get();
      rail->close(absl::UnavailableError("the peer lost its end of this rail"), *this);
      // It knows, so there is nothing to say; but perhaps something to ask.
      std::erase_if(peer->lost_rails, [&](const LostRail& lost) {
        return lost.link == question.link && lost.unsettled.empty() && lost.asked_at == kNever;
      });
      ask_about_lost_rails(*peer);
    } else if (question.link != 0 && !fenced(*peer, question.link)) {
      if (peer->fenced.size() == kMostFenced) peer->fenced.erase(peer->fenced.begin());
      peer->fenced.push_back(question.link);
    }
    ControlMessage answer{.kind = ControlMessage::Kind::kFenced, .link = question.link};
    for (const SliceName& name : question.slices) {
      answer.landed.push_back(fate_of(*peer, question.link, name));
    }
    outbox.say(*peer, answer);
  }
  answering = false;
  return true;
}

void WorkerCore::peer_lost(Peer& peer, const absl::Status& why) {
  if (redial == Time::zero()) return peer_down(peer, why);
  const Time now = clock.now();
  Redial& again = peer.redial;
  again.calling = false;
  again.hopeless.clear();
  if (again.give_up_at == kNever) {
    again.give_up_at = now + redial;
    again.pause = kFirstPause;
    again.call_at = peer.dialled ? now : now + kCourtesy;
  } else {  // it was back, and did not say a word
    again.call_at = now + again.pause;
    again.pause = std::min(2 * again.pause, kLongestPause);
  }
  if (peer.address.providers.empty()) again.call_at = kNever;  // it never said where it listens
  peer.back.call_at = kNever;
  peers.set_state(peer, PeerState::kReconnecting);
  set_timer(peer);
  --stats.peers_up;
  ++stats.peers_lost;
  peer.why = why;
  base::log_event(base::LogLevel::kWarning, "%s: lost peer %s: %s; calling it again for %.1f s",
                  self.name, peer.name, why.message(),
                  std::chrono::duration<double>(again.give_up_at - now).count());
  inbox.push_event({PeerEvent::Kind::kLost, peer.id(), peer.name, why, peer.uid});
}

// Its first new rail is up.
void WorkerCore::peer_resumed(Peer& peer) {
  ++stats.peers_resumed;
  peer.redial.calling = false;
  peer.why = absl::OkStatus();
  // As loud as the loss was.
  base::log_event(base::LogLevel::kWarning, "%s: peer resumed: %s", self.name, explain(peer));
  inbox.push_event({PeerEvent::Kind::kResumed, peer.id(), peer.name, absl::OkStatus(), peer.uid});
  for (LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) rail.asked_at = clock.now();
  }
  outbox.owe(peer);
  ask_again(peer);
  ask_about_lost_rails(peer);
  // With nothing to ask, whether it still knows this session.
  if (peer.lost_rails.empty()) outbox.say(peer, {.kind = ControlMessage::Kind::kFence});
}

// When something has to be done about the peer although nothing is heard of it.
Time WorkerCore::due(const Peer& peer) const {
  const Time parts = peer.parting ? peer.parting->give_up_at : kNever;
  if (peer.state == PeerState::kReconnecting) {
    const Redial& again = peer.redial;
    return std::min(parts,
                    again.calling ? again.give_up_at : std::min(again.give_up_at, again.call_at));
  }
  if (peer.state != PeerState::kUp) return kNever;
  Time due = std::min(parts, peer.back.call_at);
  for (const LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) due = std::min(due, rail.asked_at + patience);
  }
  return due;
}

// To be called when due() may have become earlier; later is found out when the time has come.
void WorkerCore::set_timer(Peer& peer) {
  const Time at = due(peer);
  if (at >= peer.timer) return;
  peer.timer = at;
  peer_timers.emplace_back(at, peer.id());
  std::push_heap(peer_timers.begin(), peer_timers.end(), kLater);
}

bool WorkerCore::tend_peers(Time now) {
  bool any = false;
  while (!peer_timers.empty() && peer_timers.front().first <= now) {
    const auto [at, id] = peer_timers.front();
    std::pop_heap(peer_timers.begin(), peer_timers.end(), kLater);
    peer_timers.pop_back();
    Peer* peer = find_peer(id);
    if (peer == nullptr || peer->timer != at) continue;
    peer->timer = kNever;
    if (due(*peer) <= now) {
      any = true;
      if (peer->parting && peer->parting->give_up_at <= now) {
        give_up_parting(*peer);
      } else if (peer->state == PeerState::kReconnecting) {
        call_again(*peer, now);
      } else if (peer->back.call_at <= now) {
        call_better(*peer);
      } else {
        check_answers(*peer, now);
      }
    }
    set_timer(*peer);
  }
  return any;
}

// An adapter acknowledges for a process that has stopped, and a dead host says nothing.
void WorkerCore::check_answers(Peer& peer, Time now) {
  for (LostRail& rail : peer.lost_rails) {
    if (rail.asked_at != kNever) rail.asked_at = now;
  }
  close_rails(peer, absl::UnavailableError(absl::StrFormat(
                        "%s did not say within %.1f s what had come over a lost rail "
                        "(peer.answer_ms)",
                        peer.name, std::chrono::duration<double>(patience).count())));
}

void WorkerCore::call_again(Peer& peer, Time now) {
  Redial& again = peer.redial;
  if (now >= again.give_up_at) {
    const absl::Status why = peer.why;
    return peer_down(peer, absl::UnavailableError(absl::StrFormat(
                               "%s; it could not be reached again within %.1f s (peer.redial_ms)%s",
                               why.message(), std::chrono::duration<double>(redial).count(),
                               peer.notes.empty() ? "" : absl::StrCat(": ", peer.notes.back()))));
  }
  again.calling = true;
  again.hopeless.clear();
  again.gone = false;
  peer.notes.clear();
  peer.untried.clear();
  plan_routes(peer);
}

// No route of this round led to the peer.
void WorkerCore::round_over(Peer& peer) {
  Redial& again = peer.redial;
  again.calling = false;
  if (!again.hopeless.empty()) {
    return peer_down(
        peer, absl::UnavailableError(absl::StrCat(peer.why.message(), "; ", again.hopeless)));
  }
  again.call_at = clock.now() + again.pause;
  again.pause = std::min(2 * again.pause, kLongestPause);
  set_timer(peer);
}

}  // namespace baton::internal
