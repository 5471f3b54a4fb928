// Gradients summed over ranks, bucket by bucket, while the backward pass goes on.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "engine/kernels/compute_pool.h"
#include "engine/train/data_parallel/buckets.h"
#include "engine/train/data_parallel/call_tracker.h"

namespace baton::engine::train {

// How a step is divided and put together again.
struct ParallelOptions {
  // Micro-batches per rank. A rank's gradients are added one after the other, then the ranks' sums
  // are, and the result is divided once.
  int accumulate = 1;
  int zero = 0;                    // 1: gradients, moments and updates are sharded (ZeRO-1)
  bool overlap = true;             // false: communicate after the backward pass, then wait
  size_t bucket_bytes = 0;         // of fp32; 0: see cut_buckets()
  DataType wire = DataType::kF32;  // or kBF16: half the bytes, and gradients rounded to it
};

// The sums end in place: whole buckets or, with ZeRO-1, this rank's part of each.
class GradientReducer {
 public:
  // All references must outlive the reducer.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> create(
      Communicator& comm, CallTracker& calls, ComputePool& pool, const ParallelOptions& options,
      const std::vector<FlatRange>& buckets);

  // The gradients before `end` are final: launches the buckets that are complete.
  void ready(float* gradients, size_t end);
  // Blocks until the bucket's sum is in place. To be called for every bucket, in order; the last
  // one ends the step.
  absl::Status wait(size_t bucket, float* gradients);

 private:
  GradientReducer(Communicator& comm, CallTracker& calls, ComputePool& pool,
                  const ParallelOptions& options, const std::vector<FlatRange>& buckets)
      : comm_(comm),
        calls_(calls),
        pool_(pool),
        options_(options),
        buckets_(buckets),
        launched_(buckets.size()) {}
  CallTracker::Id launch(size_t bucket, float* gradients);
  FlatRange own_part(const FlatRange& bucket) const;

  Communicator& comm_;
  CallTracker& calls_;
  ComputePool& pool_;
  const ParallelOptions options_;
  const std::vector<FlatRange>& buckets_;
  std::vector<CallTracker::Id> launched_;
  size_t next_ = 0;  // bucket to launch
  FlatArray wire_;   // bf16: two in each float
};

// ZeRO-1's second half: updated weights return to every rank while training goes on.
//
// Each rank updates its part of every bucket (Rajbhandari et al., "ZeRO", 2020, stage 1). The parts
// are gathered from the last bucket to the first, the order in which the next forward pass reads
// them, and each is awaited only when it is about to be read.

class WeightGatherer {
 public:
  // All references must outlive the gatherer.
  WeightGatherer(Communicator& comm, CallTracker& calls, const std::vector<FlatRange>& buckets)
      : comm_(comm), calls_(calls), buckets_(buckets), pending_(buckets.size()) {}

  // This rank's part of the bucket is in place: starts to gather the others'.
  void updated(size_t bucket, float* parameters);
  // Blocks until parameters [begin, end) are whole.
  absl::Status need(size_t begin, size_t end);

 private:
  Communicator& comm_;
  CallTracker& calls_;
  const std::vector<FlatRange>& buckets_;
  std::vector<CallTracker::Id> pending_;  // 0: none
};

}  // namespace baton::engine::train
