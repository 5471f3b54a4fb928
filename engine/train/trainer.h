// The training loop's step: micro-batches, the sum over ranks, the update; evaluation.
//
// Alone, or one of a Communicator's ranks. With an ordered communicator the weights are the same
// bit for bit whatever the number of ranks (as long as there are as many micro-batches, added in
// the same order), the buckets, ZeRO, and the overlap.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/compute_pool.h"
#include "engine/train/backward/parameters.h"
#include "engine/train/corpus.h"
#include "engine/train/data_parallel/buckets.h"
#include "engine/train/data_parallel/call_tracker.h"
#include "engine/train/data_parallel/data_parallel.h"
#include "engine/train/data_parallel/optimizer.h"
#include "engine/train/step/train_runner.h"

namespace baton::engine::train {

struct TrainerOptions {
  ModelConfig model;
  OptimizerOptions optimizer;  // its `steps` is how long to train
  uint64_t seed = 1;
  int batch_tokens = 4096;  // per step, of all ranks together
  int length = 256;         // of a sequence, at first
  int long_length = 1024;   // and in the last `long_share` of the steps, so that long prompts
  float long_share = 0.3f;  // make sense too; both multiples of 16
  ParallelOptions parallel;
  int max_skipped = 10;  // steps in a row whose loss or gradient is not finite
  MakeRunner runner;     // where steps are computed; empty: on the CPU
};

struct StepReport {
  int step = 0;    // just done, from 0
  float loss = 0;  // nats per token, of the whole batch
  float norm = 0;  // of the gradient
  float rate = 0;  // learning rate
  Time took{};     // by the clock
  Time exposed{};  // of that, blocked until communication was done
  // Its loss or gradient was no finite number, at whatever rank: nothing was updated.
  bool skipped = false;
};

class Trainer {
 public:
  // The corpus, the pool, the communicator and the timeline must outlive the trainer; the latter
  // two may be null. InvalidArgument where the text is too short, or a batch cannot be divided.
  static absl::StatusOr<std::unique_ptr<Trainer>> create(const TrainerOptions& options,
                                                         const Corpus& corpus, ComputePool& pool,
                                                         Communicator* comm = nullptr,
                                                         Timeline* timeline = nullptr);

  // One step, the same at all ranks. DataLoss after more than max_skipped skipped steps in a row.
  // After an error do not use this trainer again.
  absl::StatusOr<StepReport> step(int number);
  // Waits for weights that are still on their way from the last step, and has them on the host.
  absl::Status finish();

  // Bits per byte of the held-out text, in windows of the long length; at most `max_windows`, which
  // the ranks divide between them. `rounded`: with parameters rounded to bf16, as they are saved.
  absl::StatusOr<double> held_out_bits_per_byte(int max_windows, bool rounded);

  // The rest needs finish() before it.
  Checkpoint checkpoint() const { return to_checkpoint(map_, host_parameters_); }
  const float* parameters() const { return host_parameters_; }
  const ParameterMap& map() const { return map_; }
  // For people: where steps are computed.
  std::string runs_on() const { return runner_->name(); }

  // This rank's part of the training state; reuses the memory of `state`. Needs no finish().
  absl::Status save(int64_t steps, ShardState& state);
  // Takes over what `state` holds: its weights, and those moments that this rank needs.
  absl::Status load(const ShardState& state);
  // After load() of this rank's own part: fetches the other ranks' weights. ZeRO-1 only.
  absl::Status gather_weights();

  // The elements that this rank saves.
  std::vector<FlatRange> shard() const;
  // Runs in every step between the backward pass and the update. No rank finishes the step before
  // it has succeeded at all of them.
  void before_update(std::function<absl::Status()> hook) { before_update_ = std::move(hook); }
  // The tracker that other code should report its calls to; null on one rank.
  CallTracker* calls() { return calls_.get(); }

 private:
  Trainer(const TrainerOptions& options, const Corpus& corpus, ComputePool& pool,
          Communicator* comm, Timeline* timeline);

  int rank() const { return comm_ == nullptr ? 0 : comm_->rank(); }
  int ranks() const { return comm_ == nullptr ? 1 : comm_->ranks(); }
  std::vector<FlatRange> owned() const;
  absl::Status start();
  // Waits for weights that are on their way from others.
  absl::Status gathered();
  absl::Status view_parameters();
  // Runs this rank's micro-batches; their sum is in gradients_, or on its way.
  absl::Status compute_gradients(int number);
  // Reduces; then clips and updates, unless something is not finite. Returns the norm.
  absl::StatusOr<float> update(int number);
  bool all_finite(float norm) const;
  absl::Status count_skipped(const StepReport& report);
  // Visits weights and moments that are both in `state` and here: `count` elements from `here` on,
  // and from element `there` of the state's values on.
  using StateVisit = absl::FunctionRef<absl::Status(float* here, size_t there, size_t count)>;
  absl::Status for_state(const ShardState& state, StateVisit visit);
  // Brings the losses and the blocks of the norm of all ranks together.
  absl::Status share_numbers();

  const TrainerOptions options_;
  const Corpus& corpus_;
  ComputePool& pool_;
  Communicator* const comm_;
  const ParameterMap map_;
  const int micro_batches_;  // of the whole step
  const std::vector<FlatRange> buckets_;
  std::unique_ptr<TrainRunner> runner_;
  FlatArray parameters_, gradients_;
  FlatArray micro_;                         // where there are several micro-batches
  const float* host_parameters_ = nullptr;  // as they were at finish()
  std::vector<int32_t> batch_;
  std::vector<double> losses_;  // of every micro-batch of the step
  std::vector<double> mine_, everybodys_;
  int skipped_ = 0;  // in a row, up to now
  ComputeTrace trace_;
  Timeline* const timeline_;
  std::function<absl::Status()> before_update_;
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<WeightGatherer> gatherer_;
  std::unique_ptr<CallTracker> calls_;  // goes first, waiting until no call uses any of the arrays
};

}  // namespace baton::engine::train
