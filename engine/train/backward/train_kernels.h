// The elementwise kernels that only training needs: losses and the backward of each forward kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"
#include "engine/model/config.h"

namespace baton::engine::train {

// Turns one row of logits into the gradient of its loss, scale * (softmax - onehot(target)), in
// place, and returns the loss -log softmax[target]. `size` is a multiple of 16.
float cross_entropy_row(float* logits, int size, int target, float scale);

// Causal softmax of one row: columns past `valid` become 0. `size` is a multiple of 16.
void softmax_row(float* scores, int valid, int size);

// Backward of softmax, in place on dp: ds = p * (dp - sum(dp * p)).
void softmax_backward_row(const float* p, float* dp, int size);

// Backward of swiglu: gradients of gate and up from that of silu(gate) * up.
void swiglu_backward(const float* gate, const float* up, const float* dout, float* dgate,
                     float* dup, int size);

// Backward of rms_norm over one row, given the factor that rms_norm returned. dx += ..., dw += ...
void rms_norm_backward(const float* x, const float* weight, const float* dy, float factor,
                       float* dx, float* dw, int size);

// Causal attention over whole sequences with its backward pass, for training.

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
