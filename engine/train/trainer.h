// The training loop: batches, updates, evaluation. One process.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/compute_pool.h"
#include "engine/train/backprop.h"
#include "engine/train/corpus.h"
#include "engine/train/optimizer.h"
#include "engine/train/parameters.h"

namespace baton {

struct TrainerOptions {
  ModelConfig model;
  OptimizerOptions optimizer;  // its `steps` is how long to train
  uint64_t seed = 1;
  int batch_tokens = 4096;  // per step
  int length = 256;         // of a sequence, at first
  int long_length = 1024;   // and in the last `long_share` of the steps, so that long prompts
  float long_share = 0.3f;  // make sense too; both multiples of 16
};

struct StepReport {
  int step = 0;    // just done, from 0
  float loss = 0;  // nats per token
  float norm = 0;  // of the gradient
  float rate = 0;  // learning rate
};

class Trainer {
 public:
  // The corpus and the pool must outlive the trainer. InvalidArgument where the text is too short.
  static absl::StatusOr<std::unique_ptr<Trainer>> create(const TrainerOptions& options,
                                                         const Corpus& corpus, ComputePool& pool);

  StepReport step(int number);
  // Bits per byte of the held-out text, in windows of the long length; at most `max_windows`.
  // `rounded`: with parameters rounded to bf16, as they are saved.
  double held_out_bits_per_byte(int max_windows, bool rounded);
  Checkpoint checkpoint() const { return to_checkpoint(map_, parameters_.data()); }
  const ParameterMap& map() const { return map_; }

 private:
  Trainer(const TrainerOptions& options, const Corpus& corpus, ComputePool& pool);

  const TrainerOptions options_;
  const Corpus& corpus_;
  const ParameterMap map_;
  Backprop backprop_;
  AdamW optimizer_;
  AlignedArray<float> parameters_, gradients_;
  std::vector<int32_t> batch_;
};

}  // namespace baton
