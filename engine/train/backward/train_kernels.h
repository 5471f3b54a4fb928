// The elementwise kernels that only training needs: losses and the backward of each forward kernel.
#pragma once

#include <cstdint>

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

}  // namespace baton::engine::train
