// rows_to_fp8: one loop for the largest magnitude of a row, one for its codes, for every
// instruction set.
#include "kvtransfer/plans/fp8_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

// AVX-512, AVX2, SSE4 and a fallback are enough; fewer targets compile faster.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvtransfer/plans/fp8_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::kvtransfer {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F>;
using I32 = hn::RebindToSigned<F>;

constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;

// The codes of magnitudes up to 448 (and a little: scales are rounded).
// Adding 2^20 times the power of two below a magnitude, or below the smallest normal e4m3 number,
// rounds it to the digits that a code has, ties to even, and leaves them in the lowest bits: 8 to
// 16 of a normal number, 0 to 8 below. The power counts eights, and is none of the lowest 23 bits.
HWY_INLINE hn::Vec<U32> codes_of(hn::Vec<F> magnitude) {
  const U32 u32;
  const F f;
  constexpr uint32_t kExcess = (121 + 20) * 8 % 256;
  constexpr uint32_t kSmallestNormal = 121u << 23, kTwenty = 20u << 23;
  const auto power = hn::And(hn::BitCast(u32, magnitude), hn::Set(u32, kInfinity));
  const auto adds =
      hn::BitCast(f, hn::Add(hn::Max(power, hn::Set(u32, kSmallestNormal)), hn::Set(u32, kTwenty)));
  const auto rounded = hn::BitCast(u32, hn::Add(magnitude, adds));
  const auto codes = hn::Add(rounded, hn::ShiftRight<20>(rounded));
  return hn::And(hn::Sub(codes, hn::Set(u32, kExcess)), hn::Set(u32, 0xff));
}

// Calls use(bits of fp32, at) for `count` elements, a vector at a time, behind the last of which
// zeros follow.
template <bool kFp32, class Use>
HWY_INLINE void for_vectors(const std::byte* from, size_t step, size_t count, const Use& use) {
  using Bits = std::conditional_t<kFp32, uint32_t, uint16_t>;
  const hn::Rebind<Bits, F> stored;
  const U32 u32;
  const size_t lanes = hn::Lanes(u32);
  HWY_ALIGN Bits vector[hn::MaxLanes(stored)] = {};
  for (size_t at = 0; at < count; at += lanes) {
    if (step == sizeof(Bits) && count - at >= lanes) {
      std::memcpy(vector, from + at * sizeof(Bits), lanes * sizeof(Bits));
    } else {
      for (size_t i = 0; i < lanes; ++i) {
        vector[i] = 0;
        if (at + i < count) std::memcpy(&vector[i], from + (at + i) * step, sizeof(Bits));
      }
    }
    if constexpr (kFp32) {
      use(hn::Load(u32, vector), at);
    } else {
      use(hn::ShiftLeft<16>(hn::PromoteTo(u32, hn::Load(stored, vector))), at);
    }
  }
}

template <bool kFp32>
void convert_rows(const Fp8Rows& x) {
  const U32 u32;
  const I32 i32;
  const F f;
  const size_t span = x.width / x.scales_of_row, lanes = hn::Lanes(f);
  const auto magnitude_of = [&](hn::Vec<U32> bits) {
    return hn::And(bits, hn::Set(u32, kMagnitude));
  };
  // Signed: few instruction sets compare unsigned numbers, and none of these has the top bit.
  const auto finite = [&](hn::Vec<U32> magnitude) {
    return hn::RebindMask(u32,
                          hn::Lt(hn::BitCast(i32, magnitude), hn::Set(i32, int32_t{kInfinity})));
  };
  for (size_t i = 0; i < x.rows * x.scales_of_row; ++i) {
    const size_t row = i / x.scales_of_row, s = i % x.scales_of_row;
    const std::byte* from = x.from + row * x.from_step + s * span * x.from_element;
    std::byte* const to = x.to + row * x.to_step + s * span * x.to_element;
    auto most = hn::Zero(u32);
    for_vectors<kFp32>(from, x.from_element, span, [&](hn::Vec<U32> bits, size_t) {
      const auto magnitude = magnitude_of(bits);
      most = hn::Max(most, hn::IfThenElseZero(finite(magnitude), magnitude));
    });
    const float scale = scale_for(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(u32, most))));
    std::memcpy(x.scales + row * x.scales_step + s * x.scale_element, &scale, sizeof scale);
    for_vectors<kFp32>(from, x.from_element, span, [&](hn::Vec<U32> bits, size_t at) {
      const auto magnitude = magnitude_of(bits);
      const auto good = finite(magnitude);
      const auto value = hn::BitCast(f, hn::IfThenElseZero(good, magnitude));
      auto codes =
          hn::IfThenElse(good, codes_of(hn::Div(value, hn::Set(f, scale))), hn::Set(u32, 0x7f));
      codes = hn::Or(codes, hn::And(hn::ShiftRight<24>(bits), hn::Set(u32, 0x80)));
      const hn::Rebind<uint8_t, F> u8;
      HWY_ALIGN uint8_t bytes[hn::MaxLanes(u8)];
      hn::Store(hn::TruncateTo(u8, codes), u8, bytes);
      if (x.to_element == 1 && span - at >= lanes) {
        std::memcpy(to + at, bytes, lanes);
      } else {
        for (size_t k = 0; k < lanes && at + k < span; ++k) {
          to[(at + k) * x.to_element] = std::byte{bytes[k]};
        }
      }
    });
  }
}

void convert(const Fp8Rows& rows) {
  return rows.is_fp32 ? convert_rows<true>(rows) : convert_rows<false>(rows);
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::kvtransfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::kvtransfer {

HWY_EXPORT(convert);
void rows_to_fp8(const Fp8Rows& rows) { HWY_DYNAMIC_DISPATCH(convert)(rows); }

}  // namespace baton::kvtransfer
#endif  // HWY_ONCE
