// AdamW with decoupled weight decay and clipping by the global norm (Loshchilov and Hutter, 2019).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"
#include "engine/train/backward/parameters.h"
#include "engine/train/data_parallel/buckets.h"

namespace baton::engine::train {

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

// Linear warm-up, then a cosine down to final_share of the peak. Steps count from 0.
float learning_rate(const OptimizerOptions& options, int step);

// The norm of a gradient from the sums of squares of its blocks, added in their order.
float norm_of(std::span<const double> squares);

// Updates the pieces of the flat array that it was made for, and holds the moments of those alone.
// Every element's update depends on that element only: any cut into pieces gives the same bits.
class AdamW {
 public:
  // `pieces` are disjoint; each begins at a multiple of kNormBlock.
  AdamW(const ParameterMap& map, const OptimizerOptions& options, std::vector<FlatRange> pieces,
        ComputePool& pool);

  // A gradient is gradients[i] / divisor below: a sum over micro-batches and how many there were.

  // Writes the sum of squares of each kNormBlock of a piece to `squares`, which has a place for
  // every block of the flat array.
  void sum_squares(size_t piece, const float* gradients, float divisor, double* squares) const;
  // One update of a piece. `norm` is that of the whole gradient, before clipping.
  void update(size_t piece, int step, float norm, float divisor, float* parameters,
              const float* gradients);

  // First and second moments of the pieces, one behind the other.
  std::array<float*, 2> moments() { return {first_.data(), second_.data()}; }

 private:
  const ParameterMap map_;
  const OptimizerOptions options_;
  const std::vector<FlatRange> pieces_;
  std::vector<size_t> places_;  // of each piece among the moments
  ComputePool& pool_;
  AlignedArray<float> first_, second_;
};

}  // namespace baton::engine::train
