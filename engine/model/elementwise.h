// The kernels between the matrix products: normalisation, rotary embedding, gated activation.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/model/config.h"

namespace baton {

// y = x / sqrt(mean(x^2) + eps) * weight over one row of `size` (a multiple of 16) elements.
// Returns the factor on x, which the backward pass needs.
float rms_norm(const float* x, const float* weight, float* y, int size, float eps);

// out = silu(gate) * up, `size` elements.
void swiglu(const float* gate, const float* up, float* out, int size);

// x *= factor.
void scale(float* x, float factor, int size);

// Rotates one head in place, pairing element i with i + head_dim / 2 (the Hugging Face layout).
// cos and sin have head_dim / 2 entries; direction -1 rotates back.
void rope(float* head, const float* cos, const float* sin, int head_dim, float direction = 1.0f);

// Angles of every position: cos and sin [positions][head_dim / 2].
struct RopeTable {
  RopeTable() = default;
  RopeTable(const ModelConfig& config, int positions);
  const float* cos(int position) const { return cosines.data() + size_t(position) * half; }
  const float* sin(int position) const { return sines.data() + size_t(position) * half; }
  int half = 0;
  std::vector<float> cosines, sines;
};

// Rotary frequencies per pair (head_dim / 2), with the config's scaling applied.
std::vector<double> rope_frequencies(const ModelConfig& config);

// Plain versions, for tests.
void reference_rms_norm(const float* x, const float* weight, float* y, int size, float eps);
void reference_swiglu(const float* gate, const float* up, float* out, int size);

}  // namespace baton
