// How transfers end: all of their slices reported, failed, cancelled or past their deadline; and
// said once.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {

void WorkerCore::stop(uint32_t index, TransferState verdict, absl::Status why) {
  TransferSlot& slot = slots[index];
  if (slot.verdict != TransferState::kActive || slot.listed) return;
  slot.verdict = verdict;
  slot.result = std::move(why);
  Peer* peer = find_peer(slot.peer);
  if (slot.queued && peer != nullptr) dispatcher.dequeue(*peer, index);
  slot.again.clear();
  slot.next_slice = slot.slices;
  if (slot.outstanding > 0 && peer != nullptr && !slot.staged) {
    // abort() may report slices at once, and a rail may go down while we walk the list.
    for (size_t i = 0; i < peer->rails.size(); ++i) {
      Rail* rail = peer->rails[i].rail.get();
      rail->abort(slot.descriptor.id, *this);
      if (i < peer->rails.size() && peer->rails[i].rail.get() != rail) --i;
    }
  }
  if (slot.outstanding + slot.unsettled > 0) {
    slot.word.store((uint64_t{slot.descriptor.id.generation} << 8) |
                        (static_cast<uint64_t>(TransferState::kEnding) + 1),
                    std::memory_order_release);
  }
  if (slot.staged) staging->stopped(index);
  let_go(slot);
  maybe_finish(index);
}

// What was stopped, and is not read or written here any more, gives its memory back, though the
// target has not spoken.
void WorkerCore::let_go(TransferSlot& slot) {
  const uint32_t generation = slot.descriptor.id.generation;
  if (slot.staged || slot.free_generation.load(std::memory_order_relaxed) == generation) return;
  Peer* peer = slot.outstanding > 0 ? find_peer(slot.peer) : nullptr;
  if (slot.outstanding > 0) {
    if (peer == nullptr) return;
    for (const RailState& state : peer->rails) {
      if (!state.rail->let_go(slot.descriptor.id)) return;
    }
  }
  if (std::exchange(slot.uses_region, false)) {
    if (auto entry = regions.find(slot.local); entry.ok()) --(*entry)->users;
  }
  slot.free_generation.store(generation, std::memory_order_release);
}

void WorkerCore::maybe_finish(uint32_t index) {
  TransferSlot& slot = slots[index];
  if (slot.outstanding != 0 || slot.unsettled != 0 || !slot.all_posted()) return;
  if (std::exchange(slot.listed, true)) return;
  stopped.push_back(index);
}

// Announces ends outside of any provider's call, so that an EndCallback may do what it likes.
bool WorkerCore::finish_stopped() {
  bool any = false;
  announcing.store(true, std::memory_order_relaxed);
  while (!stopped.empty()) {
    const uint32_t index = stopped.back();
    stopped.pop_back();
    any = true;
    TransferSlot& slot = slots[index];
    if (slot.verdict == TransferState::kActive) {
      slot.verdict = TransferState::kDone;
      if (!slot.control) stats.bytes_moved += slot.descriptor.bytes;
    }
    if (slot.uses_region) {
      if (auto entry = regions.find(slot.local); entry.ok()) --(*entry)->users;
    }
    if (Peer* peer = find_peer(slot.peer); peer != nullptr) {
      if (slot.credit != 0 && slot.landed < slot.slices) dispatcher.take_credit(*peer, slot.credit);
      if (!slot.control) --peer->open;
      if (slot.control && slot.verdict != TransferState::kDone)
        on_control_message_failed(*peer, slot);
    }
    if (slot.control) {  // others may have waited for the slot
      outbox.slot_freed();
    }
    if (!slot.control) {
      --stats.open_transfers;
      ++stats.transfers_ended;
    }
    // Before others hear of the end: they may submit the next one.
    if (!slot.control) peers.share(slot.peer).give_back(slot.notifies);
    const TransferId id = slot.descriptor.id;
    const bool detached = slot.detached;
    if (slot.ordered()) order.ended(id, slot.verdict == TransferState::kDone);
    if (slot.on_end != nullptr) slot.on_end(slot.context, id, slot.result);
    slot.word.store((uint64_t{id.generation} << 8) | (static_cast<uint64_t>(slot.verdict) + 1),
                    std::memory_order_release);
    if (detached) {
      if (slot.ordered()) order.forget(id);
      slots.release(id);
    }
  }
  announcing.store(false, std::memory_order_relaxed);
  if (any) wakeups.signal();
  return any;
}

// A message of ours did not arrive, or perhaps not.
void WorkerCore::on_control_message_failed(Peer& peer, const TransferSlot& slot) {
  if (slot.descriptor.counter.index == CounterTable::kCredits) {
    outbox.credit_failed(peer, slot.descriptor.increment);
  } else if (LostRail* asked = asked_by(peer, slot); asked != nullptr) {
    asked->asked_at = kNever;
    ask_about_lost_rails(peer);
  }
}

bool WorkerCore::take_cancels() {
  if (!cancels.load(std::memory_order_relaxed) || !cancels.exchange(false)) return false;
  for (uint32_t i = 0; i < slots.capacity(); ++i) {
    TransferSlot& slot = slots[i];
    uint32_t asked = slot.cancel_generation.load(std::memory_order_acquire);
    if (asked == 0) continue;
    const uint64_t word = slot.word.load(std::memory_order_acquire);
    const bool active =
        word >> 8 == asked && TransferSlots::state_of(word) == TransferState::kActive;
    if (active && slot.live != asked) {  // still among the submitted: next time
      cancels.store(true);
      continue;
    }
    slot.cancel_generation.compare_exchange_strong(asked, 0);
    if (active)
      stop(i, TransferState::kCancelled, absl::CancelledError("the transfer was cancelled here"));
  }
  return true;
}

bool WorkerCore::expire(Time now) {
  bool any = false;
  while (!deadlines.empty() && deadlines.front().first <= now) {
    const TransferId id = deadlines.front().second;
    std::pop_heap(deadlines.begin(), deadlines.end(), kLater);
    deadlines.pop_back();
    const TransferSlot* slot = slots.find(id);
    if (slot == nullptr || slot->listed) continue;  // over, and told in this round
    // A stream waits no longer, whatever the target has still to say.
    if (slot->ordered()) order.ended(id, false);
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
