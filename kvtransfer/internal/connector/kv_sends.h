// Transfers of KV under way, writes of prefill's or reads of decode's: one record for each, from
// submit() until the worker's slot is free again. The records are reused; a transfer's end crosses
// from the progress thread to the engine thread without a lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvtransfer/kv_plan.h"
#include "transport/clock.h"
#include "transport/transfer.h"
#include "transport/worker.h"

namespace baton::kvtransfer {

struct KvPush;
struct KvPull;
class KvSends;

// One move of a plan, of one layer of a push or of a pull.
struct KvSend {
  KvPush* push = nullptr;
  KvPull* pull = nullptr;
  KvMove move;
  uint32_t layer = 0;  // prefill's number
  uint32_t place = 0;  // in the push's list of sends, in the pull's of reads
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
  explicit KvSends(Worker& worker) : worker_(worker), clock_(worker.clock()) {}

  KvSend& take();
  // Takes back a send that was never submitted, or that collect() has handed out.
  void put_back(KvSend& send);

  // Starts the transfer; `request` gets its callback here. ResourceExhausted: try again later.
  absl::Status submit(KvSend& send, TransferRequest& request);
  // Asks a submitted send to end.
  void cancel(KvSend& send);

  // Calls on_ended(send) for every send that has ended since; its worker's slot is free again.
  template <typename F>
  bool collect(F&& on_ended) {
    gather_ended();
    bool any = false;
    for (size_t i = 0; i < ended_.size();) {
      KvSend* send = ended_[i];
      // The end is announced a moment before the slot can be given back.
      if (absl::IsFailedPrecondition(worker_.release(send->id))) {
        ++i;
        continue;
      }
      std::swap(ended_[i], ended_.back());
      ended_.pop_back();
      --open_;
      on_ended(*send);
      any = true;
    }
    return any;
  }
  // Submitted and not handed out by collect().
  size_t open() const { return open_; }

 private:
  static void on_end(void* context, TransferId id, const absl::Status& status);
  void gather_ended();

  Worker& worker_;
  const Clock& clock_;
  std::deque<KvSend> all_;
  std::vector<KvSend*> spare_;
  std::atomic<KvSend*> arrived_{nullptr};  // stack, newest first
  std::vector<KvSend*> ended_;
  size_t open_ = 0;
};

}  // namespace baton::kvtransfer
