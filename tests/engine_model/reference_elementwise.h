// Plain versions of what engine/kernels/elementwise.h computes.
#pragma once

#include <algorithm>
#include <cmath>

namespace baton::engine {

inline void reference_rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
  double squares = 0;
  for (int i = 0; i < size; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1.0 / std::sqrt(squares / size + eps);
  for (int i = 0; i < size; ++i) y[i] = static_cast<float>(x[i] * factor * weight[i]);
}

inline void reference_softmax(float* x, int size) {
  const double top = *std::max_element(x, x + size);
  double sum = 0;
  for (int i = 0; i < size; ++i) sum += std::exp(x[i] - top);
  for (int i = 0; i < size; ++i) x[i] = static_cast<float>(std::exp(x[i] - top) / sum);
}

inline void reference_swiglu(const float* gate, const float* up, float* out, int size) {
  for (int i = 0; i < size; ++i) {
    out[i] = static_cast<float>(gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i]);
  }
}

}  // namespace baton::engine
