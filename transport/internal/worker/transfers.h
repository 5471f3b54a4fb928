// Transfers from submit() to their end: checked, taken up, ordered behind streams, stopped by a
// cancel, a deadline or the end of their peer, and announced once.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "transport/internal/stream_order.h"
#include "transport/internal/tables/peer_table.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/worker.h"

namespace baton::internal {

class WorkerCore;

// Under the worker's lock, except what is marked lock-free.
class Transfers {
 public:
  explicit Transfers(WorkerCore& core);

  // --- lock-free ---
  absl::StatusOr<TransferId> submit(const TransferRequest& request);
  uint64_t submitted() const { return submitted_.load(std::memory_order_relaxed); }
  void look_for_cancels();  // a slot's cancel_generation was set
  void note_prompt_rail() { prompt_rails_.store(true, std::memory_order_relaxed); }
  StreamOrder& order() { return order_; }  // has a lock of its own

  // --- of a round of progress; any_...(): whether the call behind it has anything to do ---
  bool take_submissions();
  bool flush_control_messages();
  bool any_cancels() const { return cancels_.load(); }
  bool take_cancels();
  bool any_deadlines() const { return !deadlines_.empty(); }
  Time next_deadline() const { return deadlines_.empty() ? kNever : deadlines_.front().first; }
  bool expire(Time now);
  bool any_behind_streams() const { return !standing_aside_.empty(); }
  bool look_at_streams();
  bool any_ended() const { return !stopped_.empty(); }
  bool finish_stopped();

  void activate(uint32_t index);
  void stop(uint32_t index, TransferState verdict, absl::Status why);
  // Stops it if it has not ended. Its slot as long as rails hold its local memory; else null.
  const TransferSlot* withdraw(TransferId id);
  // All transfers of the peer, or those with slices that are not posted yet.
  void stop_all(const Peer& peer, const absl::Status& why);
  void stop_waiting(const Peer& peer, const absl::Status& why);
  // Gives the memory of a stopped transfer back, if nothing reads or writes it here any more.
  void let_go(TransferSlot& slot);
  void maybe_finish(uint32_t index);

 private:
  static constexpr uint32_t kNone = TransferSlot::kNone;
  using Timed = std::pair<Time, TransferId>;

  absl::Status check(const TransferRequest& request) const;  // lock-free
  void fill(TransferId id, const TransferRequest& request);  // lock-free
  TransferId take_slot(const TransferRequest& request);      // lock-free
  absl::Status no_slot(const TransferRequest& request);      // locks names only
  // These two try the lock and do not wait for it.
  TransferId submit_promptly(const TransferRequest& request);
  bool post_at_once(uint32_t index);
  bool may_post_here() const;
  Peer* peer_without_queue(PeerId id);
  static void begin(TransferSlot& slot);
  absl::StatusOr<RegionEntry*> local_entry(const MemoryRegion& region, Op op);
  void note_deadline(const TransferSlot& slot);
  void line_up(Peer& peer, uint32_t index);
  void on_control_message_failed(Peer& peer, const TransferSlot& slot);

  WorkerCore& core_;
  StreamOrder order_;
  std::atomic<bool> cancels_{false};
  std::atomic<bool> prompt_rails_{false};   // there has been a PromptRail
  std::atomic<bool> announcing_{false};     // under the lock, in a caller's EndCallback
  std::vector<Timed> deadlines_;            // heap, earliest first
  std::vector<uint32_t> stopped_;           // ended, not announced yet
  std::vector<TransferId> standing_aside_;  // until streams have come so far
  // Written by each caller: not beside what each round reads.
  alignas(64) std::atomic<uint64_t> submitted_{0};
};

}  // namespace baton::internal
