// How transfers end: all of their slices reported, failed, cancelled or past their deadline; and
// announced once.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {

void Transfers::stop(uint32_t index, TransferState verdict, absl::Status why) {
  TransferSlot& slot = core_.slots[index];
  if (slot.verdict != TransferState::kActive || slot.listed) return;
  slot.verdict = verdict;
  slot.result = std::move(why);
  Peer* peer = core_.peers.find(slot.peer);
  if (slot.queued && peer != nullptr) core_.dispatcher.dequeue(*peer, index);
  slot.again.clear();
  slot.next_slice = slot.slices;
  if (slot.outstanding > 0 && peer != nullptr && !slot.staged) {
    // abort() may report slices at once, and a rail may go down while we walk the list.
    for (size_t i = 0; i < peer->rails.size(); ++i) {
      Rail* rail = peer->rails[i].rail.get();
      rail->abort(slot.descriptor.id, core_);
      if (i < peer->rails.size() && peer->rails[i].rail.get() != rail) --i;
    }
  }
  if (slot.outstanding + slot.unsettled > 0) {
    slot.word.store((uint64_t{slot.descriptor.id.generation} << 8) |
                        (static_cast<uint64_t>(TransferState::kEnding) + 1),
                    std::memory_order_release);
  }
  if (slot.staged) core_.staging->stopped(index);
  let_go(slot);
  maybe_finish(index);
}

const TransferSlot* Transfers::withdraw(TransferId id) {
  take_submissions();
  TransferSlot* slot = core_.slots.find(id);
  if (slot == nullptr || slot->live != id.generation) return nullptr;
  stop(id.slot, TransferState::kCancelled, absl::CancelledError("the transfer was withdrawn here"));
  if (slot->outstanding > 0) let_go(*slot);
  const bool held = slot->outstanding > 0 && !slot->staged &&
                    slot->free_generation.load(std::memory_order_relaxed) != id.generation;
  return held ? slot : nullptr;
}

// Although the target has not answered.
void Transfers::let_go(TransferSlot& slot) {
  const uint32_t generation = slot.descriptor.id.generation;
  if (slot.staged || slot.free_generation.load(std::memory_order_relaxed) == generation) return;
  Peer* peer = slot.outstanding > 0 ? core_.peers.find(slot.peer) : nullptr;
  if (slot.outstanding > 0) {
    if (peer == nullptr) return;
    for (const RailState& state : peer->rails) {
      if (!state.rail->let_go(slot.descriptor.id)) return;
    }
  }
  if (std::exchange(slot.uses_region, false)) {
    if (auto entry = core_.regions.find(slot.local); entry.ok()) --(*entry)->users;
  }
  slot.free_generation.store(generation, std::memory_order_release);
}

void Transfers::stop_all(const Peer& peer, const absl::Status& why) {
  for (uint32_t i = 0; peer.open > 0 && i < core_.slots.capacity(); ++i) {
    const TransferSlot& slot = core_.slots[i];
    const uint64_t word = slot.word.load(std::memory_order_acquire);
    // Another thread has just taken this slot: its transfer has not begun, and is not ours to end.
    if (word >> 8 != slot.live || (word & 0xff) == 0 || ended(TransferSlots::state_of(word)) ||
        slot.control || slot.peer != peer.id()) {
      continue;
    }
    stop(i, TransferState::kFailed, why);
  }
}

void Transfers::stop_waiting(const Peer& peer, const absl::Status& why) {
  for (const SlotQueue* queue : {&peer.urgent, &peer.bulk, &peer.held}) {
    while (queue->head != kNone) stop(queue->head, TransferState::kFailed, why);
  }
  for (const TransferId id : standing_aside_) {
    const TransferSlot* slot = core_.slots.find(id);
    if (slot != nullptr && slot->peer == peer.id()) stop(id.slot, TransferState::kFailed, why);
  }
}

void Transfers::maybe_finish(uint32_t index) {
  TransferSlot& slot = core_.slots[index];
  if (slot.outstanding != 0 || slot.unsettled != 0 || !slot.all_posted()) return;
  if (std::exchange(slot.listed, true)) return;
  stopped_.push_back(index);
}

// Announces ends outside of any provider's call, so that an EndCallback may do what it likes.
bool Transfers::finish_stopped() {
  bool any = false;
  announcing_.store(true, std::memory_order_relaxed);
  while (!stopped_.empty()) {
    const uint32_t index = stopped_.back();
    stopped_.pop_back();
    any = true;
    TransferSlot& slot = core_.slots[index];
    if (slot.verdict == TransferState::kActive) {
      slot.verdict = TransferState::kDone;
      if (!slot.control) core_.stats.bytes_moved += slot.descriptor.bytes;
    }
    if (slot.uses_region) {
      if (auto entry = core_.regions.find(slot.local); entry.ok()) --(*entry)->users;
    }
    if (Peer* peer = core_.peers.find(slot.peer); peer != nullptr) {
      if (slot.credit != 0 && slot.landed < slot.slices)
        core_.dispatcher.take_credit(*peer, slot.credit);
      if (!slot.control) --peer->open;
      if (slot.control && slot.verdict != TransferState::kDone)
        on_control_message_failed(*peer, slot);
    }
    if (slot.control) {
      core_.outbox.slot_freed();
    } else {
      --core_.stats.open_transfers;
      ++core_.stats.transfers_ended;
    }
    // Before others hear of the end: they may submit the next one.
    if (!slot.control) core_.peers.share(slot.peer).give_back(slot.notifies);
    const TransferId id = slot.descriptor.id;
    const bool detached = slot.detached;
    if (slot.ordered()) order_.ended(id, slot.verdict == TransferState::kDone);
    if (slot.on_end != nullptr) slot.on_end(slot.context, id, slot.result);
    slot.word.store((uint64_t{id.generation} << 8) | (static_cast<uint64_t>(slot.verdict) + 1),
                    std::memory_order_release);
    if (detached) {
      if (slot.ordered()) order_.forget(id);
      core_.slots.release(id);
    }
  }
  announcing_.store(false, std::memory_order_relaxed);
  if (any) core_.wakeups.signal();
  return any;
}

// A message of ours did not arrive, or perhaps not.
void Transfers::on_control_message_failed(Peer& peer, const TransferSlot& slot) {
  if (slot.descriptor.counter.index == CounterTable::kCredits) {
    core_.outbox.credit_failed(peer, slot.descriptor.increment);
  } else if (LostRail* asked = core_.lost_rails.asked_by(peer, slot); asked != nullptr) {
    asked->asked_at = kNever;
    core_.lost_rails.ask_about_lost_rails(peer);
  }
}

bool Transfers::take_cancels() {
  if (!cancels_.load(std::memory_order_relaxed) || !cancels_.exchange(false)) return false;
  for (uint32_t i = 0; i < core_.slots.capacity(); ++i) {
    TransferSlot& slot = core_.slots[i];
    uint32_t asked = slot.cancel_generation.load(std::memory_order_acquire);
    if (asked == 0) continue;
    const uint64_t word = slot.word.load(std::memory_order_acquire);
    const bool active =
        word >> 8 == asked && TransferSlots::state_of(word) == TransferState::kActive;
    if (active && slot.live != asked) {  // still among the submitted: next time
      cancels_.store(true);
      continue;
    }
    slot.cancel_generation.compare_exchange_strong(asked, 0);
    if (active)
      stop(i, TransferState::kCancelled, absl::CancelledError("the transfer was cancelled here"));
  }
  return true;
}

bool Transfers::expire(Time now) {
  bool any = false;
  while (!deadlines_.empty() && deadlines_.front().first <= now) {
    const TransferId id = deadlines_.front().second;
    std::pop_heap(deadlines_.begin(), deadlines_.end(), kLater);
    deadlines_.pop_back();
    const TransferSlot* slot = core_.slots.find(id);
    if (slot == nullptr || slot->listed) continue;  // over, and told in this round
    // A stream waits no longer, whatever the target has still to say.
    if (slot->ordered()) order_.ended(id, false);
    if (slot->verdict != TransferState::kActive) continue;
    stop(id.slot, TransferState::kDeadline,
         absl::DeadlineExceededError(
             absl::StrFormat("the transfer's timeout ran out with %u of %u slices posted",
                             slot->next_slice, slot->slices)));
    any = true;
  }
  return any;
}

}  // namespace baton::internal
