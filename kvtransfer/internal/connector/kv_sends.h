// Transfers of KV under way, writes of prefill's or reads of decode's: one record for each, from
// begin() until the worker's slot is free again. The records are reused; a transfer's end crosses
// from the progress thread to the engine thread without a lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "kvtransfer/internal/connector/kv_route.h"
#include "kvtransfer/internal/connector/kv_waiting.h"
#include "kvtransfer/kv_plan.h"
#include "transport/clock.h"
#include "transport/transfer.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

class KvSends;
struct KvSend;

// What a load moves to or from one peer: a push of prefill's, a pull of decode's. It must not go
// while transfers of it are open.
struct KvFlow {
  PeerId peer;
  KvRoute route;
  std::vector<KvSend*> open;  // not ended; their page lists lie in the route and the request
};

// One move of a plan, of one layer of a flow.
struct KvSend {
  KvFlow* flow = nullptr;
  KvMove move;
  uint32_t layer = 0;  // prefill's number
  uint32_t place = 0;  // in the flow's list
  bool submitted = false;
  TransferId id;
  Time begin{};

  // Written by the progress thread when the transfer ends.
  KvSends* owner = nullptr;
  Time end{};
  absl::Status status;
  KvSend* next = nullptr;
};

// All calls from one thread. Must outlive the worker's transfers.
class KvSends {
 public:
  class Owner {
   public:
    virtual ~Owner() = default;
    // Both sides of a move's transfer, and what it counts.
    virtual void fill(const KvSend& send, TransferRequest& request) = 0;
    // The worker does not take a move of this flow.
    virtual void on_refused(KvFlow& flow, const absl::Status& why) = 0;
    // It has ended, as `send.status` says, and is open no more. The flow may go.
    virtual void on_ended(const KvSend& send) = 0;
  };
  // `owner` must outlive this object.
  KvSends(Worker& worker, Op op, Owner& owner)
      : worker_(worker), clock_(worker.clock()), op_(op), owner_(owner) {}

  // Starts a move, now or when the worker has a slot for it.
  void begin(KvFlow& flow, uint32_t layer, const KvMove& move);
  // Cancels the flow's transfers; on_ended() says when each has ended. What waited is gone.
  void stop(KvFlow& flow);
  // Tells of ended transfers, starts those that waited. True if anything happened.
  bool progress();
  // Transfers that have not been told of.
  size_t open() const { return open_; }

 private:
  static void on_end(void* context, TransferId id, const absl::Status& status);
  bool submit(KvSend& send);  // false: there is no slot, keep it
  static void leave_flow(KvSend& send);
  void put_back(KvSend& send);

  Worker& worker_;
  const Clock& clock_;
  const Op op_;
  Owner& owner_;
  std::deque<KvSend> all_;
  std::vector<KvSend*> spare_;
  KvWaiting<KvSend*> waiting_;             // by peer_key(): for a slot of the worker
  std::atomic<KvSend*> arrived_{nullptr};  // stack, newest first
  std::vector<KvSend*> ended_;
  size_t open_ = 0;
};

}  // namespace baton::kvtransfer
