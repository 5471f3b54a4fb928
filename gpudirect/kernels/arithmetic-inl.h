// Numbers in kernels: the same bits on a GPU and on the host. No multiply-add is fused unless it is
// written so (-fmad=false, -ffp-contract=off).
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define BATON_DEVICE __device__ __forceinline__
#define BATON_UNROLL _Pragma("unroll")
#define BATON_UNROLL_BY_4 _Pragma("unroll 4")
#define BATON_NO_UNROLL _Pragma("unroll 1")
#else
#define BATON_DEVICE inline
#define BATON_UNROLL
#define BATON_UNROLL_BY_4
#define BATON_NO_UNROLL
#endif

namespace baton::gpudirect::kernels {

struct alignas(16) Vector16 {
  uint32_t word[4];
};
struct alignas(8) Vector8 {
  uint32_t word[2];
};
template <uint32_t kCount>
struct alignas(4 * kCount) Words {
  uint32_t word[kCount];
};

BATON_DEVICE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
BATON_DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
template <class T>
BATON_DEVICE constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
BATON_DEVICE T larger(T a, T b) {
  return a < b ? b : a;
}
// function(i) for a thread's share of kCount: neighbours have neighbours.
template <uint32_t kCount, uint32_t kThreads, class Function>
BATON_DEVICE void each_share(uint32_t thread, const Function& function) {
  BATON_UNROLL
  for (uint32_t j = 0; j < (kCount + kThreads - 1) / kThreads; ++j) {
    const uint32_t i = j * kThreads + thread;
    if (kCount % kThreads == 0 || i < kCount) function(i);
  }
}
BATON_DEVICE uint32_t pieces_of(uint32_t all, uint32_t each) { return (all + each - 1) / each; }

BATON_DEVICE float from_bf16(uint32_t half) { return float_of(half << 16); }

// To nearest, ties to even; NaN stays NaN.
BATON_DEVICE uint32_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

// Two numbers in a word, the first one in its lower half; NaN stays NaN, with whatever payload.
BATON_DEVICE uint32_t round_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_bf16(low) | to_bf16(high) << 16;
#endif
}

BATON_DEVICE float from_f16(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude < 0x0400u) {  // multiples of 2^-24
    return float_of(bits_of(static_cast<float>(magnitude) * 0x1p-24f) | sign);
  }
  const uint32_t rebias = (127u - 15) << 23;
  const uint32_t bits = (magnitude << 13) + rebias;
  return float_of((magnitude > 0x7bffu ? bits + rebias : bits) | sign);
}

BATON_DEVICE uint32_t to_f16(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
  const uint32_t bits = bits_of(value) & 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00u;
  if (bits > 0x477fffffu) return sign | 0x7c00u;
  if (bits < (127u - 14) << 23) {  // the last place of 0.5 is that of f16's denormals
    return sign | (bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
  }
  const uint32_t rounded = bits + 0xfffu + (bits >> 13 & 1);
  const uint32_t half = (rounded - ((127u - 15) << 23)) >> 13;
  return sign | (half > 0x7c00u ? 0x7c00u : half);
}

// e^x for x <= 88, 0 below -87: Cephes expf, as in the engine's kernels. The nearest whole number
// is what is left of a sum with 1.5 * 2^23, which takes neither of the GPU's slow conversions; and
// without a branch several are computed at once.
BATON_DEVICE float exponential(float x) {
  const float most = smaller(x, 88.0f);
  const float shifted = most * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = fmaf(n, -0.693359375f, most);
  r = fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r) + 1.0f;
  const float power = p * float_of((bits_of(shifted) << 23) + bits_of(1.0f));
  return x < -87.0f ? 0.0f : x != x ? x : power;
}

}  // namespace baton::gpudirect::kernels
