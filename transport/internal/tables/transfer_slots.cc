// Slots are handed around by index through two lock-free stacks: free ones, and submitted ones.
#include "transport/internal/tables/transfer_slots.h"

#include "transport/internal/tables/arrivals.h"

namespace baton::internal {
namespace {
constexpr uint64_t word_of(uint32_t generation, TransferState state) {
  return (uint64_t{generation} << 8) | (static_cast<uint64_t>(state) + 1);
}
}  // namespace

TransferSlots::TransferSlots(uint32_t capacity)
    : capacity_(capacity),
      slots_(new TransferSlot[capacity + kReserved]),
      free_head_(head_after(0, capacity, 0)) {
  static_assert(Arrivals::kMaxSlots < kIndexMask, "one value more stands for no slot");
  for (uint32_t i = 0; i < capacity; ++i) {
    slots_[i].next_free = i + 1 < capacity ? i + 1 : TransferSlot::kNone;
  }
}

TransferId TransferSlots::acquire(PeerShare::Open open, bool notifies) {
  uint64_t head = free_head_.load(std::memory_order_acquire);
  uint32_t index = 0;
  uint32_t free = 0;
  do {
    index = index_in(head);
    free = free_in(head);
    if (!PeerShare::leaves_room(open, notifies, free, capacity_)) return TransferId{};
  } while (!free_head_.compare_exchange_weak(
      head, head_after(head, free - 1, slots_[index].next_free.load(std::memory_order_relaxed)),
      std::memory_order_acquire, std::memory_order_acquire));
  TransferSlot& slot = slots_[index];
  uint32_t generation = static_cast<uint32_t>(slot.word.load(std::memory_order_relaxed) >> 8) + 1;
  if (generation == 0) generation = 1;
  slot.word.store(word_of(generation, TransferState::kActive), std::memory_order_release);
  return TransferId{index, generation};
}

absl::StatusOr<TransferId> TransferSlots::acquire_reserved() {
  for (uint32_t index = capacity_; index < capacity_ + kReserved; ++index) {
    const uint64_t word = slots_[index].word.load(std::memory_order_relaxed);
    if ((word & 0xff) != 0 && !ended(state_of(word))) continue;
    uint32_t generation = static_cast<uint32_t>(word >> 8) + 1;
    if (generation == 0) generation = 1;
    slots_[index].word.store(word_of(generation, TransferState::kActive),
                             std::memory_order_release);
    return TransferId{index, generation};
  }
  return absl::ResourceExhaustedError("all reserved transfers are in use");
}

void TransferSlots::give_back(TransferId id) {
  slots_[id.slot].word.store(word_of(id.generation, TransferState::kFailed),
                             std::memory_order_release);
  release(id);
}

void TransferSlots::push(TransferId id) {
  uint32_t head = submitted_head_.load(std::memory_order_relaxed);
  do {
    slots_[id.slot].next_submitted.store(head, std::memory_order_relaxed);
  } while (!submitted_head_.compare_exchange_weak(head, id.slot, std::memory_order_seq_cst,
                                                  std::memory_order_relaxed));
}

const TransferSlot* TransferSlots::find(TransferId id) const {
  if (id.slot >= capacity_ + kReserved || id.generation == 0) return nullptr;
  const uint64_t word = slots_[id.slot].word.load(std::memory_order_acquire);
  return word >> 8 == id.generation && (word & 0xff) != 0 ? &slots_[id.slot] : nullptr;
}

TransferSlot* TransferSlots::find(TransferId id) {
  return const_cast<TransferSlot*>(static_cast<const TransferSlots*>(this)->find(id));
}

bool TransferSlots::release(TransferId id) {
  if (id.slot >= capacity_ || id.generation == 0) return false;
  TransferSlot& slot = slots_[id.slot];
  uint64_t word = slot.word.load(std::memory_order_acquire);
  if (word >> 8 != id.generation || (word & 0xff) == 0 || !ended(state_of(word)) ||
      !slot.word.compare_exchange_strong(word, uint64_t{id.generation} << 8,
                                         std::memory_order_acq_rel)) {
    return false;
  }
  uint64_t head = free_head_.load(std::memory_order_relaxed);
  do {
    slot.next_free.store(index_in(head), std::memory_order_relaxed);
  } while (!free_head_.compare_exchange_weak(head, head_after(head, free_in(head) + 1, id.slot),
                                             std::memory_order_release, std::memory_order_relaxed));
  return true;
}

uint32_t TransferSlots::pop_submitted() {
  if (taken_ == TransferSlot::kNone) {
    // Take the whole stack and turn it round: oldest first.
    uint32_t index = submitted_head_.exchange(TransferSlot::kNone, std::memory_order_seq_cst);
    while (index != TransferSlot::kNone) {
      const uint32_t older = slots_[index].next_submitted.load(std::memory_order_relaxed);
      slots_[index].next_submitted.store(taken_, std::memory_order_relaxed);
      taken_ = index;
      index = older;
    }
  }
  const uint32_t index = taken_;
  if (index != TransferSlot::kNone) {
    taken_ = slots_[index].next_submitted.load(std::memory_order_relaxed);
  }
  return index;
}

}  // namespace baton::internal
