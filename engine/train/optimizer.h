// AdamW with decoupled weight decay and clipping by the global norm (Loshchilov and Hutter, 2019).
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/model/aligned.h"
#include "engine/model/compute_pool.h"
#include "engine/train/parameters.h"

namespace baton {

struct OptimizerOptions {
  float learning_rate = 3e-3f;  // at its peak
  float final_share = 0.05f;    // of the peak, at the last step
  int warmup_steps = 60;
  int steps = 1000;  // the whole schedule
  float beta1 = 0.9f;
  float beta2 = 0.95f;
  float epsilon = 1e-8f;
  float weight_decay = 0.1f;  // of matrices
  float clip = 1.0f;          // largest norm of the whole gradient
};

class AdamW {
 public:
  AdamW(const ParameterMap& map, const OptimizerOptions& options, ComputePool& pool);

  // Linear warm-up, then a cosine down to final_share of the peak. Steps count from 0.
  float learning_rate(int step) const;
  // One update. Returns the norm of the gradient before clipping. Deterministic.
  float update(int step, float* parameters, const float* gradients);

 private:
  const ParameterMap map_;
  const OptimizerOptions options_;
  ComputePool& pool_;
  AlignedArray<float> first_, second_;  // moments
};

}  // namespace baton
