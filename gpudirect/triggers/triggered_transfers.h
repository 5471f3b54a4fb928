// Transfers that running kernels start: prepared here, and named by a number in a kernel's trigger.
//
//   TriggeredTransfers transfers(worker, fifo->consumer());
//   const uint32_t layer_3 = *transfers.prepare(request);    // 512 pages, say
//   ... a kernel: push_trigger(block, queue, {layer_3, first_page, pages, epoch}) ...
//   while (running) { transfers.progress(); worker.progress(); }
//
// A trigger starts the pieces [first, first + count) of one that was prepared: whatever a kernel
// writes into the queue, nothing else moves.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/triggers/trigger_fifo.h"
#include "transport/worker.h"

namespace baton::gpudirect {

// For one thread at a time; state() may be read from any.
class TriggeredTransfers {
 public:
  // Both outlive it. No other object prepares in this queue or takes from it, until this one has
  // ended.
  TriggeredTransfers(Worker& worker, TriggerConsumer& queue)
      : worker_(worker), queue_(queue), first_number_(queue.prepared()) {}
  // Cancels what was started and waits for its end. What kernels still ask for by the numbers of
  // this one is refused, whoever takes from the queue then.
  ~TriggeredTransfers();
  TriggeredTransfers(const TriggeredTransfers&) = delete;
  TriggeredTransfers& operator=(const TriggeredTransfers&) = delete;

  // The number for triggers. The request is copied, with the page lists of its layouts. Its pieces
  // are the steps of the outermost dimension, of which both layouts have as many, of equal bytes;
  // it is one piece where both are one run. A counter, a notification and a timeout are those of
  // each trigger's transfer. InvalidArgument for a request with order to streams, a callback or
  // `detached`, for one of 2^32 pieces and more, and for layouts that no region could hold; what
  // else is wrong with it is said by state() when it is started. FailedPrecondition where another
  // object else has prepared in the queue.
  absl::StatusOr<uint32_t> prepare(const TransferRequest& request);
  // From now on triggers of the epochs before are refused, those too that were taken from the queue
  // and wait for a slot; what was started goes on. Returns the new one; NotFound where no such
  // transfer was prepared.
  absl::StatusOr<uint32_t> renew(uint32_t transfer);

  // Starts what kernels have asked for; true if anything happened. What finds no slot waits: where
  // one peer has its share of them (Worker::submit()), triggers for the others pass by, each peer's
  // in their order. Once kMostWaiting wait, nothing more is taken from the queue until some have
  // been started: kernels find it full.
  static constexpr size_t kMostWaiting = 1024;
  bool progress();

  struct State {
    uint64_t started = 0;
    uint64_t done = 0;
    uint64_t failed = 0;
    absl::Status last_failure;
  };
  State state(uint32_t transfer) const;  // of one that there is not: a failure, and nothing else
  bool idle() const;                     // all that was taken has ended

 private:
  struct Peer {
    PeerId id;
    std::deque<Trigger> waiting;  // taken, but no slot was free
  };
  struct Prepared {
    TransferRequest request;
    size_t peer = 0;                           // its place in peers_
    std::vector<std::vector<uint32_t>> lists;  // of the layouts' dimensions
    std::string notify;
    std::atomic<uint64_t> started{0};
    std::atomic<uint64_t> done{0};
    std::atomic<uint64_t> failed{0};
    mutable std::mutex mutex;
    absl::Status last_failure;
  };
  static Layout own(const Layout& layout, std::vector<std::vector<uint32_t>>& lists);
  const Prepared* find(uint32_t transfer) const;  // null: none of ours
  Prepared& row_of(const Trigger& trigger) { return prepared_[trigger.transfer - first_number_]; }
  static void on_end(void* prepared, TransferId id, const absl::Status& status);
  size_t peer_of(PeerId id);
  bool start(const Trigger& trigger);  // false: no slot is free
  bool start_waiting(Peer& peer);      // true if any was started or refused
  void forget_ended();

  Worker& worker_;
  TriggerConsumer& queue_;
  const uint32_t first_number_;   // of ours: those before are of whoever had the queue
  mutable std::mutex preparing_;  // for a state query while more are prepared
  std::deque<Prepared> prepared_;
  std::vector<Peer> peers_;
  size_t first_ = 0;    // of the peers, in the next round: none is always behind another
  size_t waiting_ = 0;  // of all peers
  std::vector<TransferId> open_;
  size_t look_at_ = 64;  // open ones, before those that have ended are forgotten
};

}  // namespace baton::gpudirect
