// A copy of every rank's part of the training state in the memory of the next rank (as in Gemini,
// Wang et al., SOSP 2023).
//
// Two copies alternate. The next one is begun only when every rank has the last one whole: a copy
// of step s is complete at all ranks before any of them finishes step s + 1. So whenever ranks die,
// the survivors have one in common, and it holds the part of a dead rank if its neighbour lives.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "engine/train/data_parallel/buckets.h"
#include "engine/train/trainer.h"

namespace baton::engine::train {

// The copies that a process holds. They outlive communicators and trainers.
struct ReplicaStore {
  static constexpr int64_t kNothing = -1;
  struct Copy {
    int64_t own_steps = kNothing;  // what `own` is a state of, and `previous`
    int64_t peer_steps = kNothing;
    ShardState own;            // this rank's part
    AlignedArray<float> peer;  // ShardState::values of the rank before this one
  };
  std::array<Copy, 2> copies;
  size_t next = 0;  // copy to write next
};

// Sends and receives copies, for one trainer with ZeRO-1 and its communicator.
class Replicator {
 public:
  // All must outlive it, and the trainer's calls must have ended before the store goes.
  Replicator(Communicator& comm, Trainer& trainer, ReplicaStore& store);

  // Copies the state after `steps` steps to the next rank, in the background.
  absl::Status begin(int64_t steps);

  // Finds the newest state that the ranks hold between them, and gives every rank its part of it,
  // weights and all. Returns its steps, or kNothing if they hold none: a rank and the one after it
  // were lost, or nothing was copied yet. All ranks call it, before the first step.
  absl::StatusOr<int64_t> restore();

 private:
  absl::Status complete();

  Communicator& comm_;
  Trainer& trainer_;
  ReplicaStore& store_;
  ReplicaStore::Copy* under_way_ = nullptr;
  CallTracker::Id sending_ = 0, receiving_ = 0;
};

// The ranks' reports about their stores: own_steps and peer_steps of both copies.
using Holdings = std::array<int64_t, 4>;
Holdings holdings_of(const ReplicaStore& store);
// The newest steps that every rank or the one after it holds; kNothing if there are none.
int64_t newest_common(absl::Span<const Holdings> ranks);

}  // namespace baton::engine::train
