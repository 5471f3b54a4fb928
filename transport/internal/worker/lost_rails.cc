// Finds out what had landed of what was on lost rails.
#include "transport/internal/worker/lost_rails.h"

#include <algorithm>

#include "transport/internal/worker/core.h"

namespace baton::internal {
namespace {
constexpr size_t kMostFenced = 256;
}  // namespace

LostRail& LostRails::lost_rail(Peer& peer, uint64_t link) {
  const auto lost = std::find_if(peer.lost_rails.begin(), peer.lost_rails.end(),
                                 [&](const LostRail& rail) { return rail.link == link; });
  return lost != peer.lost_rails.end() ? *lost : peer.lost_rails.emplace_back(link);
}

void LostRails::unsettled(Peer& peer, uint64_t link, const SliceName& name,
                          const std::optional<Ordinal>& number) {
  LostRail& rail = lost_rail(peer, link);
  rail.unsettled.push_back(name);
  rail.named.push_back(!number ? name : SliceName{{kNoSlot, number->epoch}, number->number});
  ++core_.slots[name.transfer.slot].unsettled;
}

void LostRails::settle(const SliceName& name, Fate fate) {
  TransferSlot* slot = core_.slots.find(name.transfer);
  if (slot == nullptr || slot->unsettled == 0) return;
  --slot->unsettled;
  if (fate == Fate::kUnknown) {
    core_.transfers.stop(
        name.transfer.slot, TransferState::kFailed,
        absl::AbortedError("it is not known whether the counter was raised: the peer does not "
                           "remember the rail that was lost"));
    return core_.transfers.maybe_finish(name.transfer.slot);
  }
  const bool landed = fate == Fate::kLanded;
  if (landed) {
    ++slot->landed;
    core_.stats.receipts += !slot->control;
  }
  Peer* peer = core_.peers.find(slot->peer);
  if (landed || slot->verdict != TransferState::kActive || peer == nullptr) {
    core_.transfers.maybe_finish(name.transfer.slot);
    return;
  }
  ++core_.stats.slices_moved;
  slot->again.push_back(name.slice);
  if (!slot->queued) core_.dispatcher.enqueue(*peer, name.transfer.slot);
}

void LostRails::settle_all(Peer& peer, const absl::Status& why) {
  const std::vector<LostRail> lost = std::move(peer.lost_rails);
  peer.lost_rails.clear();
  for (const LostRail& rail : lost) {
    for (const SliceName& name : rail.unsettled) {
      TransferSlot* slot = core_.slots.find(name.transfer);
      if (slot == nullptr || slot->unsettled == 0) continue;
      --slot->unsettled;
      core_.transfers.stop(name.transfer.slot, TransferState::kFailed, why);
      core_.transfers.maybe_finish(name.transfer.slot);
    }
  }
}

// Also where nothing of ours was on it: the peer may not have noticed, and wait for what it sent.
void LostRails::ask_about_lost_rails(Peer& peer) {
  if (peer.state != PeerState::kUp) return;
  for (LostRail& rail : peer.lost_rails) {
    if (!rail.gone || rail.asked_at != kNever) continue;
    rail.asked_at = core_.clock.now();
    rail.heard = false;
    core_.outbox.say(
        peer, {.kind = ControlMessage::Kind::kFence, .link = rail.link, .slices = rail.named});
  }
  core_.sessions.set_timer(peer);
}

// A rail was lost: an answer may have been on it, although the peer has heard the question. A
// question that was on that rail itself ends, and on_control_message_failed() asks again.
void LostRails::ask_again(Peer& peer) {
  for (LostRail& rail : peer.lost_rails) {
    if (rail.heard) rail.asked_at = kNever;
  }
}

LostRail* LostRails::asked_by(Peer& peer, const TransferSlot& slot) {
  if (slot.descriptor.counter.index != CounterTable::kControl) return nullptr;
  const auto words = ControlMessage::decode(slot.descriptor.notify);
  if (!words.ok() || words->kind != ControlMessage::Kind::kFence) return nullptr;
  for (LostRail& rail : peer.lost_rails) {
    if (rail.link == words->link && rail.asked_at != kNever) return &rail;
  }
  return nullptr;
}

void LostRails::hear(Peer& peer, Rail& rail, std::string_view words) {
  absl::StatusOr<ControlMessage> message = ControlMessage::decode(words);
  if (!message.ok()) {
    core_.closing.close_later(peer.id(), &rail, message.status());
    return;
  }
  if (message->kind == ControlMessage::Kind::kFenced) return on_fenced(peer, *message);
  if (message->kind == ControlMessage::Kind::kPart) return core_.sessions.part_asked(peer);
  if (peer.unsaid >= kMostUnsaid) {
    core_.closing.close_later(
        peer.id(), &rail,
        absl::InvalidArgumentError("the peer asks again and again about rails that "
                                   "were lost but does not read the answers"));
    return;
  }
  questions_.emplace_back(peer.id(), *std::move(message));
}

void LostRails::on_fenced(Peer& peer, const ControlMessage& answer) {
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

void LostRails::note_counted(Peer& peer, uint64_t link, const Rail& rail) {
  const auto* counting = dynamic_cast<const CountingRail*>(&rail);
  const auto counted = counting != nullptr ? counting->counted() : std::nullopt;
  if (!counted) return;
  if (peer.counted.size() == kMostFenced) peer.counted.erase(peer.counted.begin());
  peer.counted.emplace_back(link, *counted);
}

Fate LostRails::fate_of(const Peer& peer, uint64_t link, const SliceName& name) {
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
void LostRails::look_for_asked_rails() {
  for (size_t i = 0; i < questions_.size(); ++i) {
    const Peer* peer = core_.peers.find(questions_[i].first);
    const uint64_t link = questions_[i].second.link;
    if (peer == nullptr || link == 0) continue;
    if (std::any_of(peer->rails.begin(), peer->rails.end(),
                    [&](const RailState& rail) { return rail.link == link; })) {
      continue;
    }
    for (auto& provider : core_.providers) provider->progress(core_);
    return;
  }
}

bool LostRails::answer_questions() {
  if (questions_.empty()) return false;
  look_for_asked_rails();
  const auto asked = std::move(questions_);
  questions_.clear();
  answering_ = true;
  for (const auto& each : asked) {
    const ControlMessage& question = each.second;
    Peer* peer = core_.peers.find(each.first);
    if (peer == nullptr || peer->state == PeerState::kDown) continue;
    const auto state = std::find_if(
        peer->rails.begin(), peer->rails.end(),
        [&](const RailState& rail) { return question.link != 0 && rail.link == question.link; });
    if (state != peer->rails.end()) {
      Rail* rail = state->rail.get();
      rail->close(absl::UnavailableError("the peer lost its end of this rail"), core_);
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
    core_.outbox.say(*peer, answer);
  }
  answering_ = false;
  return true;
}

bool LostRails::fenced(const Peer& peer, uint64_t link) {
  return std::find(peer.fenced.begin(), peer.fenced.end(), link) != peer.fenced.end();
}

}  // namespace baton::internal
