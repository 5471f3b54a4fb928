// Vector helpers for kernel sources, compiled once per target: 16 fixed lanes, bf16 and exp.
// Kernels that reduce do so in 16 lanes whatever the vector width, so that every width gives the
// same bits; kSub vectors make up the 16 lanes.

#if defined(BATON_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BATON_SIMD_MATH_INL_H_
#undef BATON_SIMD_MATH_INL_H_
#else
#define BATON_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using V = hn::Vec<F>;
constexpr size_t kLanes = hn::MaxLanes(F());
constexpr size_t kSub = 16 / kLanes;

BATON_INLINE V load_bf16(const uint16_t* from) {
  const hn::Rebind<uint16_t, F> half;
  const hn::Rebind<uint32_t, F> word;
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(word, hn::LoadU(half, from))));
}

// As bf16_from_float(), in the lower halves.
BATON_INLINE hn::Vec<hn::RebindToUnsigned<F>> round_to_bf16(V x) {
  const hn::RebindToUnsigned<F> u;
  const hn::RebindToSigned<F> s;
  const auto bits = hn::BitCast(u, x);
  const auto high = hn::ShiftRight<16>(bits);
  const auto up = hn::Add(hn::And(high, hn::Set(u, 1)), hn::Set(u, 0x7fff));
  const auto magnitude = hn::BitCast(s, hn::And(bits, hn::Set(u, 0x7fffffff)));
  const auto is_nan = hn::RebindMask(u, hn::Gt(magnitude, hn::Set(s, 0x7f800000)));
  return hn::IfThenElse(is_nan, hn::Or(high, hn::Set(u, 0x40)),
                        hn::ShiftRight<16>(hn::Add(bits, up)));
}

// e^x for x <= 88; 0 below -87. Cephes expf: relative error under 2e-7.
BATON_INLINE V exp_vector(V x) {
  const F f;
  const hn::RebindToSigned<F> i;
  const auto too_low = hn::Lt(x, hn::Set(f, -87.0f));
  x = hn::IfThenElse(too_low, hn::Zero(f), hn::Min(x, hn::Set(f, 88.0f)));
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(f, 1.44269504088896341f)));
  const V nf = hn::ConvertTo(f, n);
  V r = hn::MulAdd(nf, hn::Set(f, -0.693359375f), x);
  r = hn::MulAdd(nf, hn::Set(f, 2.12194440e-4f), r);
  V p = hn::Set(f, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(f, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(f, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(f, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(f, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(f, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(f, 1.0f));
  const V scale = hn::BitCast(f, hn::ShiftLeft<23>(hn::Add(n, hn::Set(i, 127))));
  return hn::IfThenElse(too_low, hn::Zero(f), hn::Mul(p, scale));
}

// gate * sigmoid(gate) * up.
BATON_INLINE V swiglu_vector(V gate, V up) {
  const F f;
  const V silu = hn::Div(gate, hn::Add(hn::Set(f, 1.0f), exp_vector(hn::Neg(gate))));
  return hn::Mul(silu, up);
}

// Sum of 16 lanes, in order.
BATON_INLINE float sum_in_order(const V (&lanes)[kSub]) {
  HWY_ALIGN float values[16];
  for (size_t s = 0; s < kSub; ++s) hn::Store(lanes[s], F(), values + s * kLanes);
  float sum = 0.0f;
  for (const float value : values) sum += value;
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#endif
