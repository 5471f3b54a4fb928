// Causal attention over whole sequences with its backward pass, for training.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"
#include "engine/model/config.h"

namespace baton::engine::train {

// Lengths are multiples of 16. One task per (sequence, KV head); rows are handled in blocks, so
// that work above the diagonal is mostly skipped. Not thread-safe.
class TrainAttention {
 public:
  TrainAttention(const ModelConfig& config, int max_length, ComputePool& pool);

  // qkv [sequences * length][(H + 2 KV) * head_dim], rotated. `weights` keeps the probabilities,
  // [sequences][H][length][length]; out is [sequences * length][H * head_dim].
  void forward(const float* qkv, int sequences, int length, float* weights, float* out);
  // d_out like out; writes all of d_qkv.
  void backward(const float* qkv, const float* weights, const float* d_out, int sequences,
                int length, float* d_qkv);

 private:
  struct Scratch {
    AlignedArray<float> packed_a;  // K^T, or V^T
    AlignedArray<float> packed_b;  // V, or K
    AlignedArray<float> packed_c;  // a block of q or d_out
    AlignedArray<float> block;     // [kRows][length] gradients of scores
  };
  const ModelConfig config_;
  ComputePool& pool_;
  GemmScratch gemm_scratch_;
  std::vector<Scratch> scratch_;
};

}  // namespace baton::engine::train
