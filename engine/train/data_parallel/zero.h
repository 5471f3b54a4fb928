// ZeRO-1's second half: updated weights return to every rank while training goes on.
//
// Each rank updates its part of every bucket (Rajbhandari et al., "ZeRO", 2020, stage 1). The parts
// are gathered from the last bucket to the first, the order in which the next forward pass reads
// them, and each is awaited only when it is about to be read.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "collectives/communicator.h"
#include "engine/train/data_parallel/buckets.h"
#include "engine/train/data_parallel/call_tracker.h"

namespace baton::engine::train {

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
