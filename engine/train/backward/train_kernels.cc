// Vector kernels of the backward pass. Sums run in 16 lanes whatever the vector width.
#include "engine/train/backward/train_kernels.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/train/backward/train_kernels.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "engine/kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine::train {
namespace HWY_NAMESPACE {
using namespace engine::HWY_NAMESPACE;  // lanes, exp and dot of simd_math-inl.h

constexpr int kStep = static_cast<int>(kLanes);

float max_of(const float* x, int size) {
  float most = x[0];
  for (int i = 1; i < size; ++i) most = std::max(most, x[i]);
  return most;
}

// x = exp(x - shift), returns the sum.
float exp_sum(float* x, float shift, int size) {
  const F f;
  const V by = hn::Set(f, shift);
  V sums[kSub];
  for (size_t s = 0; s < kSub; ++s) sums[s] = hn::Zero(f);
  for (int i = 0; i < size; i += 16) {
    for (size_t s = 0; s < kSub; ++s) {
      const V e = exp_vector(hn::Sub(hn::LoadU(f, x + i + s * kLanes), by));
      hn::StoreU(e, f, x + i + s * kLanes);
      sums[s] = hn::Add(sums[s], e);
    }
  }
  return sum_in_order(sums);
}

void multiply(float* x, float factor, int size) {
  const F f;
  const V by = hn::Set(f, factor);
  for (int i = 0; i < size; i += kStep) {
    hn::StoreU(hn::Mul(hn::LoadU(f, x + i), by), f, x + i);
  }
}

float dot(const float* a, const float* b, int size) {
  const F f;
  V sums[kSub];
  for (size_t s = 0; s < kSub; ++s) sums[s] = hn::Zero(f);
  for (int i = 0; i < size; i += 16) {
    for (size_t s = 0; s < kSub; ++s) {
      sums[s] =
          hn::MulAdd(hn::LoadU(f, a + i + s * kLanes), hn::LoadU(f, b + i + s * kLanes), sums[s]);
    }
  }
  return sum_in_order(sums);
}

float cross_entropy(float* logits, int size, int target, float scale) {
  const float most = max_of(logits, size);
  const float right = logits[target];
  const float sum = exp_sum(logits, most, size);
  multiply(logits, scale / sum, size);
  logits[target] -= scale;
  return std::log(sum) - (right - most);
}

void softmax(float* scores, int valid, int size) {
  const float most = max_of(scores, valid);
  for (int i = valid; i < size; ++i) scores[i] = -1e30f;
  multiply(scores, 1.0f / exp_sum(scores, most, size), size);
}

void softmax_backward(const float* p, float* dp, int size) {
  const F f;
  const V sum = hn::Set(f, dot(p, dp, size));
  for (int i = 0; i < size; i += kStep) {
    const V d = hn::Sub(hn::LoadU(f, dp + i), sum);
    hn::StoreU(hn::Mul(hn::LoadU(f, p + i), d), f, dp + i);
  }
}

void swiglu_back(const float* gate, const float* up, const float* dout, float* dgate, float* dup,
                 int size) {
  const F f;
  const V one = hn::Set(f, 1.0f);
  for (int i = 0; i < size; i += kStep) {
    const V g = hn::LoadU(f, gate + i), u = hn::LoadU(f, up + i), d = hn::LoadU(f, dout + i);
    const V sigmoid = hn::Div(one, hn::Add(one, exp_vector(hn::Neg(g))));
    const V silu = hn::Mul(g, sigmoid);
    // silu' = sigmoid * (1 + g * (1 - sigmoid))
    const V slope = hn::Mul(sigmoid, hn::MulAdd(g, hn::Sub(one, sigmoid), one));
    hn::StoreU(hn::Mul(hn::Mul(d, u), slope), f, dgate + i);
    hn::StoreU(hn::Mul(d, silu), f, dup + i);
  }
}

void rms_back(const float* x, const float* weight, const float* dy, float factor, float* dx,
              float* dw, int size) {
  const F f;
  V sums[kSub];
  for (size_t s = 0; s < kSub; ++s) sums[s] = hn::Zero(f);
  for (int i = 0; i < size; i += 16) {
    for (size_t s = 0; s < kSub; ++s) {
      const size_t at = i + s * kLanes;
      const V wd = hn::Mul(hn::LoadU(f, weight + at), hn::LoadU(f, dy + at));
      sums[s] = hn::MulAdd(wd, hn::LoadU(f, x + at), sums[s]);
    }
  }
  const V by = hn::Set(f, factor);
  const V pull =
      hn::Set(f, sum_in_order(sums) * factor * factor * factor / static_cast<float>(size));
  for (int i = 0; i < size; i += kStep) {
    const V v = hn::LoadU(f, x + i), d = hn::LoadU(f, dy + i);
    const V own = hn::Mul(hn::Mul(d, hn::LoadU(f, weight + i)), by);
    const V change = hn::NegMulAdd(v, pull, own);
    hn::StoreU(hn::Add(hn::LoadU(f, dx + i), change), f, dx + i);
    hn::StoreU(hn::MulAdd(hn::Mul(v, by), d, hn::LoadU(f, dw + i)), f, dw + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine::train
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine::train {

HWY_EXPORT(cross_entropy);
HWY_EXPORT(softmax);
HWY_EXPORT(softmax_backward);
HWY_EXPORT(swiglu_back);
HWY_EXPORT(rms_back);

float cross_entropy_row(float* logits, int size, int target, float scale) {
  return HWY_DYNAMIC_DISPATCH(cross_entropy)(logits, size, target, scale);
}
void softmax_row(float* scores, int valid, int size) {
  HWY_DYNAMIC_DISPATCH(softmax)(scores, valid, size);
}
void softmax_backward_row(const float* p, float* dp, int size) {
  HWY_DYNAMIC_DISPATCH(softmax_backward)(p, dp, size);
}
void swiglu_backward(const float* gate, const float* up, const float* dout, float* dgate,
                     float* dup, int size) {
  HWY_DYNAMIC_DISPATCH(swiglu_back)(gate, up, dout, dgate, dup, size);
}
void rms_norm_backward(const float* x, const float* weight, const float* dy, float factor,
                       float* dx, float* dw, int size) {
  HWY_DYNAMIC_DISPATCH(rms_back)(x, weight, dy, factor, dx, dw, size);
}

}  // namespace baton::engine::train
#endif  // HWY_ONCE
