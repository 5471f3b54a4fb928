// rms_norm, swiglu, rope: vector kernels and their tables.
#include "engine/model/elementwise.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/model/elementwise.cc"
#include "engine/model/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "engine/model/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton {
namespace HWY_NAMESPACE {

float rms_norm_row(const float* x, const float* weight, float* y, int size, float eps) {
  const F f;
  V squares[kSub];
  for (size_t s = 0; s < kSub; ++s) squares[s] = hn::Zero(f);
  for (int i = 0; i < size; i += 16) {
    for (size_t s = 0; s < kSub; ++s) {
      const V value = hn::LoadU(f, x + i + s * kLanes);
      squares[s] = hn::MulAdd(value, value, squares[s]);
    }
  }
  const float factor = 1.0f / std::sqrt(sum_in_order(squares) / static_cast<float>(size) + eps);
  const V scaled = hn::Set(f, factor);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    const V value = hn::Mul(hn::LoadU(f, x + i), scaled);
    hn::StoreU(hn::Mul(value, hn::LoadU(f, weight + i)), f, y + i);
  }
  return factor;
}

void swiglu_row(const float* gate, const float* up, float* out, int size) {
  const F f;
  const V one = hn::Set(f, 1.0f);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    const V g = hn::LoadU(f, gate + i);
    const V silu = hn::Div(g, hn::Add(one, exp_vector(hn::Neg(g))));
    hn::StoreU(hn::Mul(silu, hn::LoadU(f, up + i)), f, out + i);
  }
}

void scale_row(float* x, float factor, int size) {
  const F f;
  const V by = hn::Set(f, factor);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    hn::StoreU(hn::Mul(hn::LoadU(f, x + i), by), f, x + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton {

HWY_EXPORT(rms_norm_row);
HWY_EXPORT(swiglu_row);
HWY_EXPORT(scale_row);

float rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
  return HWY_DYNAMIC_DISPATCH(rms_norm_row)(x, weight, y, size, eps);
}

void swiglu(const float* gate, const float* up, float* out, int size) {
  HWY_DYNAMIC_DISPATCH(swiglu_row)(gate, up, out, size);
}

void scale(float* x, float factor, int size) { HWY_DYNAMIC_DISPATCH(scale_row)(x, factor, size); }

void rope(float* head, const float* cos, const float* sin, int head_dim, float direction) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half], s = sin[i] * direction;
    head[i] = a * cos[i] - b * s;
    head[i + half] = b * cos[i] + a * s;
  }
}

// Scaling as in transformers' modeling_rope_utils.py.
std::vector<double> rope_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(static_cast<size_t>(config.head_dim / 2));
  const RopeScaling& scaling = config.rope_scaling;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / config.head_dim;
    double frequency = std::pow(config.rope_theta, -exponent);
    if (scaling.kind == RopeScaling::Kind::kLinear) {
      frequency /= scaling.factor;
    } else if (scaling.kind == RopeScaling::Kind::kLlama3) {
      const double turns =
          scaling.original_max_position_embeddings * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp(
          (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
          0.0, 1.0);
      frequency = frequency * smooth + frequency / scaling.factor * (1 - smooth);
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

RopeTable::RopeTable(const ModelConfig& config, int positions)
    : half(config.head_dim / 2),
      cosines(static_cast<size_t>(positions) * static_cast<size_t>(half)),
      sines(cosines.size()) {
  const std::vector<double> frequencies = rope_frequencies(config);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = p * frequencies[static_cast<size_t>(i)];
      cosines[size_t(p) * half + i] = static_cast<float>(std::cos(angle));
      sines[size_t(p) * half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

void reference_rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
  double squares = 0;
  for (int i = 0; i < size; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1.0 / std::sqrt(squares / size + eps);
  for (int i = 0; i < size; ++i) y[i] = static_cast<float>(x[i] * factor * weight[i]);
}

void reference_swiglu(const float* gate, const float* up, float* out, int size) {
  for (int i = 0; i < size; ++i) {
    out[i] = static_cast<float>(gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i]);
  }
}

}  // namespace baton
#endif  // HWY_ONCE
