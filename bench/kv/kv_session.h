// The active side of `baton kv_bw`: a connection to a target, memory on both sides, and the loop of
// transfers that is timed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/kv/kv_bw.h"
#include "bench/kv/workload.h"
#include "bench/report/bench_memory.h"
#include "bench/report/child_process.h"
#include "transport/worker.h"

namespace baton::bench {

// The passive side of `baton kv_bw`: memory that an initiator asks for, fills, reads, writes and
// has checked. It is told what to do by notifications, so that it works over any provider.
//
//   initiator -> target                        target -> initiator
//   {"do":"setup","role":R,"workload":W}       {"ok":true,"region":HEX,"backing":TEXT}
//   {"do":"fill","seed":N}                     {"ok":true}
//   {"do":"poison"}                            {"ok":true}
//   {"do":"check","seed":N}                    {"ok":true}
//   {"do":"bye"}                               (none)
//
// R is "source" or "target" of the bytes; an error comes as {"error":TEXT}.

struct KvTargetOptions {
  bool once = false;                            // return after the first initiator has left
  std::optional<int> device;                    // memory of this CUDA device
  std::function<void(const std::string&)> say;  // lines for people; may be empty
};

// Serves initiators, one at a time, on the calling thread, which drives the worker.
absl::Status serve_kv_target(Worker& worker, const KvTargetOptions& options);

// The cores that a benchmark pins its two sides to; -1: not pinned.
struct Cores {
  int initiator = -1;
  int target = -1;
};
// Two cores where there are two and the options want it.
Cores choose_cores(const KvBwOptions& options);

// Not thread-safe. Drives its worker on the calling thread.
class KvSession {
 public:
  // Forks the target (unless options.host names one), pins, connects. Call it while this process
  // has one thread. Errors: whatever the worker says; Unavailable when no server answers.
  static absl::StatusOr<std::unique_ptr<KvSession>> open(const KvBwOptions& options, Cores cores);
  ~KvSession();
  KvSession(const KvSession&) = delete;
  KvSession& operator=(const KvSession&) = delete;

  // Makes memory for the workload on both sides: pattern at the source, poison at the target.
  absl::Status prepare(Op op, const WorkloadSpec& spec);

  // Runs `count` transfers, `inflight` at a time; returns the seconds that took altogether.
  absl::StatusOr<double> run(size_t count, size_t inflight);

  // DataLoss unless every byte of the last prepare() has arrived, and no other was touched. Leaves
  // the memory poisoned: prepare() again.
  absl::Status verify();

  // The transfer that run() submits.
  const TransferRequest& request() const { return request_; }
  const Workload& workload() const { return *workload_; }
  BenchMemory& local() { return *local_; }
  size_t remote_bytes() const;
  // From submit() to the end, and in submit(), of every transfer since they were forgotten, in
  // microseconds.
  const std::vector<double>& latencies() const { return latencies_; }
  const std::vector<double>& submits() const { return submits_; }
  void forget_times() {
    latencies_.clear();
    submits_.clear();
  }
  Worker& worker() { return *worker_; }
  std::string route() const;
  // "memfd, 2 MiB pages" of this side.
  const std::string& backing() const { return local_->backing(); }

 private:
  // One transfer under way.
  struct Flight {
    TransferId id;
    Time begin{};
    Time end{};
  };

  KvSession() = default;
  absl::StatusOr<Json> ask(const Json& question);
  absl::Status land(Flight& flight);

  std::optional<ChildProcess> target_;
  std::unique_ptr<Worker> worker_;
  PeerId peer_;
  Op op_ = Op::kWrite;
  uint64_t seed_ = 0;
  std::unique_ptr<Workload> workload_;
  std::optional<int> device_;
  std::unique_ptr<BenchMemory> local_;
  TransferRequest request_;
  std::vector<Flight> flights_;
  std::vector<double> latencies_, submits_;
};

}  // namespace baton::bench
