// The kernels between the matrix products: normalisation, rotary embedding, gated activation, and
// what weighs experts.
#pragma once

#include <cstddef>

namespace baton::engine {

// y = x / sqrt(mean(x^2) + eps) * weight over one row of `size` (a multiple of 16) elements.
// Returns the factor on x, which the backward pass needs.
float rms_norm(const float* x, const float* weight, float* y, int size, float eps);

// out = silu(gate) * up, `size` elements.
void swiglu(const float* gate, const float* up, float* out, int size);

// x *= factor.
void scale(float* x, float factor, int size);

// y += x * factor, with one rounding; `size` (a multiple of 16) elements.
void add_scaled(const float* x, float factor, float* y, int size);

// x = e^x / sum of e^x over one row of `size` (a multiple of 16) elements; of -infinity it makes 0.
void softmax(float* x, int size);

// Rotates one head in place, pairing element i with i + head_dim / 2 (the Hugging Face layout).
// cos and sin have head_dim / 2 entries; direction -1 rotates back.
void rope(float* head, const float* cos, const float* sin, int head_dim, float direction = 1.0f);

}  // namespace baton::engine
