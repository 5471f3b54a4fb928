// Transfer slots: the fixed table behind TransferId, and the lock-free way from submit() to the
// progress thread. Internal to the worker.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/provider.h"
#include "transport/transfer.h"

namespace baton::internal {

// What one peer's transfers may take of a worker's slots: those of a peer that does not read, or is
// not reached, must leave some for all others.

// The share of one peer. All calls from any thread.
class PeerShare {
 public:
  // Transfers that have begun and not ended.
  struct Open {
    uint32_t all = 0;
    uint32_t notifying = 0;  // of them, those with a notification
  };

  // Counts another one; what was there before it.
  Open take(bool notifies) { return split(word_.fetch_add(one(notifies), kOrder)); }
  // A transfer has ended, or did not begin after all.
  void give_back(bool notifies) { word_.fetch_sub(one(notifies), kOrder); }
  Open open() const { return split(word_.load(kOrder)); }

  // Whether a peer with so many may have another one while so many of all slots are free: no more
  // than are free, so that one peer has half of all at most. When less than half is free it is less
  // than that, in proportion: of many peers that take all they may, one after the other, k leave
  // about all / 2k. Half as many with notifications: those that wait for credit must not keep the
  // peer's other transfers out. The first is not refused: who is refused has something to wait for.
  static bool leaves_room(Open open, bool notifies, uint32_t free, uint32_t all) {
    if (free == 0) return false;
    const uint64_t room = uint64_t{free} * std::min<uint64_t>(all, 2 * uint64_t{free});
    if (open.all > 0 && uint64_t{open.all} * all >= room) return false;
    return !notifies || open.notifying == 0 || 2 * uint64_t{open.notifying} * all < room;
  }

 private:
  // A number by which nothing else is made visible.
  static constexpr auto kOrder = std::memory_order_relaxed;
  static constexpr uint64_t one(bool notifies) { return uint64_t{notifies} << 32 | 1; }
  static constexpr Open split(uint64_t word) {
    return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
  }
  std::atomic<uint64_t> word_{0};  // notifying << 32 | all
};

struct TransferSlot {
  static constexpr uint32_t kNone = UINT32_MAX;

  // generation (32 bits) << 8 | TransferState + 1; low byte 0: free. Written by submit() and
  // release(), and by the progress thread when the transfer ends.
  std::atomic<uint64_t> word{0};
  std::atomic<uint32_t> cancel_generation{0};  // == generation: cancel() was called
  std::atomic<uint32_t> free_generation{0};    // == generation: its local memory is free
  std::atomic<uint32_t> ordered_generation{
      0};  // == generation: streams wait for it, or it for them
  std::atomic<uint32_t> next_submitted{kNone};
  std::atomic<uint32_t> next_free{kNone};

  // Filled by submit(), then read by the progress thread only.
  TransferDescriptor descriptor;
  PeerId peer;
  MemoryRegion local;
  Time deadline = kNever;
  EndCallback on_end = nullptr;
  void* context = nullptr;
  bool detached = false;
  bool notifies = false;  // as its peer's share counts it
  bool control = false;   // the worker's own: gives a peer credit for notifications
  std::array<char, kInlineNotification> notify_inline;
  std::string notify_heap;

  // The progress thread's.
  size_t slice_bytes = 0;
  uint32_t slices = 0;       // in all
  uint32_t next_slice = 0;   // not posted yet from here on
  uint32_t outstanding = 0;  // posted and not reported
  uint32_t unsettled = 0;    // reported by a rail that was lost: the target is being asked
  uint32_t reposts = 0;
  uint32_t landed = 0;          // slices that were reported as done
  uint64_t credit = 0;          // taken from the peer's window for the notification
  bool held = false;            // waits for credit
  std::vector<uint32_t> again;  // came back from a failed rail
  uint32_t live = 0;            // the generation that the fields here belong to
  bool uses_region = false;     // counted in its region's users
  bool queued = false;
  bool mapped = false;    // between devices, by a mapping of the peer's memory
  bool staged = false;    // Staging has it, and ends it
  bool passes = false;    // the peer's best rails do not reach its region
  bool listed = false;    // among the stopped, soon to be announced
  uint32_t prev = kNone;  // in its peer's queue
  uint32_t next = kNone;
  TransferState verdict = TransferState::kActive;  // != kActive: stopped, waiting for its slices
  absl::Status result;

  bool ordered() const {
    return ordered_generation.load(std::memory_order_relaxed) == descriptor.id.generation;
  }
  bool all_posted() const { return next_slice == slices && again.empty(); }
  // A transfer of the worker's own.
  void fill_control(const TransferDescriptor& what, PeerId to) {
    descriptor = what;
    peer = to;
    local = {};
    deadline = kNever;
    on_end = nullptr;
    detached = false;
    control = true;
  }
};

class TransferSlots {
 public:
  explicit TransferSlots(uint32_t capacity);

  // Any thread. Takes a free slot: its generation moves on and it reads as active. Of generation 0
  // where there is none, or none for a peer of which so many are open (PeerShare).
  TransferId acquire(PeerShare::Open open = {}, bool notifies = false);
  uint32_t free() const { return free_in(free_head_.load(std::memory_order_relaxed)); }
  // Slots that submit() never gets: for the worker's own words to its peers.
  static constexpr uint32_t kReserved = 128;
  // Progress thread. One of them; it is free again when its transfer has ended.
  absl::StatusOr<TransferId> acquire_reserved();
  // Any thread. Of an acquired one: it is not used after all.
  void give_back(TransferId id);
  // Any thread. Hands a filled slot to the progress thread.
  void push(TransferId id);
  // Any thread. The slot behind a live id, or null.
  TransferSlot* find(TransferId id);
  const TransferSlot* find(TransferId id) const;
  // Any thread. Gives the slot of an ended transfer back; false if it is active or not live.
  bool release(TransferId id);

  // Progress thread: the oldest submitted slot, or kNone. FIFO per submitting thread.
  uint32_t pop_submitted();
  // Usually false; every round of progress asks.
  bool has_submitted() const {
    return taken_ != TransferSlot::kNone ||
           submitted_head_.load(std::memory_order_seq_cst) != TransferSlot::kNone;
  }

  TransferSlot& operator[](uint32_t index) { return slots_[index]; }
  uint32_t capacity() const { return capacity_; }

  static TransferState state_of(uint64_t word) {
    return static_cast<TransferState>((word & 0xff) - 1);
  }

 private:
  // How many are free is known with the head of their list, by the same exchange. The tag makes a
  // head that was taken and put back a different one.
  static constexpr int kIndexBits = 17;  // both fit: Arrivals::kMaxSlots
  static constexpr uint64_t kIndexMask = (uint64_t{1} << kIndexBits) - 1;
  static constexpr uint32_t index_in(uint64_t head) { return head & kIndexMask; }
  static constexpr uint32_t free_in(uint64_t head) { return head >> kIndexBits & kIndexMask; }
  static constexpr uint64_t head_after(uint64_t head, uint32_t free, uint32_t index) {
    return ((head >> 2 * kIndexBits) + 1) << 2 * kIndexBits | uint64_t{free} << kIndexBits |
           (index & kIndexMask);
  }

  const uint32_t capacity_;
  std::unique_ptr<TransferSlot[]> slots_;
  std::atomic<uint64_t> free_head_;                            // tag, how many, index of the first
  std::atomic<uint32_t> submitted_head_{TransferSlot::kNone};  // newest first
  uint32_t taken_ = TransferSlot::kNone;                       // oldest first
};

}  // namespace baton::internal
