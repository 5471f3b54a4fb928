// rms_norm, swiglu, scale, add_scaled, softmax, rope: the vector kernels.
#include "engine/kernels/elementwise.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/elementwise.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "engine/kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
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
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    hn::StoreU(swiglu_vector(hn::LoadU(f, gate + i), hn::LoadU(f, up + i)), f, out + i);
  }
}

void scale_row(float* x, float factor, int size) {
  const F f;
  const V by = hn::Set(f, factor);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    hn::StoreU(hn::Mul(hn::LoadU(f, x + i), by), f, x + i);
  }
}

void add_scaled_row(const float* x, float factor, float* y, int size) {
  const F f;
  const V by = hn::Set(f, factor);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    hn::StoreU(hn::MulAdd(hn::LoadU(f, x + i), by, hn::LoadU(f, y + i)), f, y + i);
  }
}

// Products and their sum are rounded apart, here and in the tail: CMake keeps the compiler from
// fusing them in this file, so that heads of any size and every width have the same bits.
void rope_head(float* head, const float* cos, const float* sin, int half, float direction) {
  const F f;
  const V way = hn::Set(f, direction);
  int i = 0;
  for (; i + static_cast<int>(kLanes) <= half; i += static_cast<int>(kLanes)) {
    const V a = hn::LoadU(f, head + i), b = hn::LoadU(f, head + i + half);
    const V c = hn::LoadU(f, cos + i), s = hn::Mul(hn::LoadU(f, sin + i), way);
    hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), f, head + i);
    hn::StoreU(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), f, head + i + half);
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[i + half], s = sin[i] * direction;
    head[i] = a * cos[i] - b * s;
    head[i + half] = b * cos[i] + a * s;
  }
}

void softmax_row(float* x, int size) {
  const F f;
  V largest = hn::LoadU(f, x);
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    largest = hn::Max(largest, hn::LoadU(f, x + i));
  }
  const V top = hn::MaxOfLanes(f, largest);
  V sums[kSub];
  for (size_t s = 0; s < kSub; ++s) sums[s] = hn::Zero(f);
  for (int i = 0; i < size; i += 16) {
    for (size_t s = 0; s < kSub; ++s) {
      const V odds = exp_vector(hn::Sub(hn::LoadU(f, x + i + s * kLanes), top));
      sums[s] = hn::Add(sums[s], odds);
      hn::StoreU(odds, f, x + i + s * kLanes);
    }
  }
  const V sum = hn::Set(f, sum_in_order(sums));
  for (int i = 0; i < size; i += static_cast<int>(kLanes)) {
    hn::StoreU(hn::Div(hn::LoadU(f, x + i), sum), f, x + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(rms_norm_row);
HWY_EXPORT(swiglu_row);
HWY_EXPORT(scale_row);
HWY_EXPORT(add_scaled_row);
HWY_EXPORT(softmax_row);
HWY_EXPORT(rope_head);

float rms_norm(const float* x, const float* weight, float* y, int size, float eps) {
  return HWY_DYNAMIC_DISPATCH(rms_norm_row)(x, weight, y, size, eps);
}

void swiglu(const float* gate, const float* up, float* out, int size) {
  HWY_DYNAMIC_DISPATCH(swiglu_row)(gate, up, out, size);
}

void scale(float* x, float factor, int size) { HWY_DYNAMIC_DISPATCH(scale_row)(x, factor, size); }

void add_scaled(const float* x, float factor, float* y, int size) {
  HWY_DYNAMIC_DISPATCH(add_scaled_row)(x, factor, y, size);
}

void softmax(float* x, int size) { HWY_DYNAMIC_DISPATCH(softmax_row)(x, size); }

void rope(float* head, const float* cos, const float* sin, int head_dim, float direction) {
  HWY_DYNAMIC_DISPATCH(rope_head)(head, cos, sin, head_dim / 2, direction);
}

}  // namespace baton::engine
#endif  // HWY_ONCE
