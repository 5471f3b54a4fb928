// rows_to_fp8: one loop for the largest magnitude of a row, one for its codes, for every
// instruction set; and rows whose elements lie apart are put together first.
#include "kvtransfer/plans/fp8_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

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

// A vector of elements, as the bits of fp32.
template <bool kFp32>
HWY_INLINE hn::Vec<U32> load(const std::byte* from) {
  const U32 u32;
  if constexpr (kFp32) {
    const hn::Repartition<uint8_t, F> bytes;
    return hn::BitCast(u32, hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(from)));
  } else {
    const hn::Rebind<uint16_t, F> u16;
    HWY_ALIGN uint16_t halves[hn::MaxLanes(u16)];
    std::memcpy(halves, from, hn::Lanes(u16) * sizeof(uint16_t));
    return hn::ShiftLeft<16>(hn::PromoteTo(u32, hn::Load(u16, halves)));
  }
}

// Calls use(bits, at) for all elements. What is left over of vectors goes through memory of a whole
// one, in which zeros follow.
template <bool kFp32, class Use>
HWY_INLINE void for_vectors(const std::byte* from, size_t count, const Use& use) {
  constexpr size_t kBytes = kFp32 ? 4 : 2;
  const size_t lanes = hn::Lanes(F());
  size_t at = 0;
  for (; at + lanes <= count; at += lanes) use(load<kFp32>(from + at * kBytes), at);
  if (at == count) return;
  std::byte rest[hn::MaxLanes(F()) * kBytes] = {};
  std::memcpy(rest, from + at * kBytes, (count - at) * kBytes);
  use(load<kFp32>(rest), at);
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
    const std::byte* from = x.from + row * x.from_step + s * span * (kFp32 ? 4 : 2);
    std::byte* const to = x.to + row * x.to_step + s * span;
    auto most = hn::Zero(u32);
    for_vectors<kFp32>(from, span, [&](hn::Vec<U32> bits, size_t) {
      const auto magnitude = magnitude_of(bits);
      most = hn::Max(most, hn::IfThenElseZero(finite(magnitude), magnitude));
    });
    const float scale = scale_for(std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(u32, most))));
    std::memcpy(x.scales + row * x.scales_step + s * x.scale_element, &scale, sizeof scale);
    for_vectors<kFp32>(from, span, [&](hn::Vec<U32> bits, size_t at) {
      const auto magnitude = magnitude_of(bits);
      const auto good = finite(magnitude);
      const auto value = hn::BitCast(f, hn::IfThenElseZero(good, magnitude));
      auto codes =
          hn::IfThenElse(good, codes_of(hn::Div(value, hn::Set(f, scale))), hn::Set(u32, 0x7f));
      codes = hn::Or(codes, hn::And(hn::ShiftRight<24>(bits), hn::Set(u32, 0x80)));
      const hn::Rebind<uint8_t, F> u8;
      HWY_ALIGN uint8_t bytes[hn::MaxLanes(u8)];
      hn::Store(hn::TruncateTo(u8, codes), u8, bytes);
      std::memcpy(to + at, bytes, std::min(lanes, span - at));
    });
  }
}

void convert_bf16(const Fp8Rows& rows) { convert_rows<false>(rows); }
void convert_fp32(const Fp8Rows& rows) { convert_rows<true>(rows); }

}  // namespace HWY_NAMESPACE
}  // namespace baton::kvtransfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::kvtransfer {

namespace {

constexpr size_t kAtOnce = 8;

#define BATON_FP8_NAME(target) #target
#define BATON_FP8_LOOPS(target) \
  Fp8Loops { BATON_FP8_NAME(target), target::convert_bf16, target::convert_fp32 }

// Not by Highway's own table: that is in its library, which nothing else here needs.
std::vector<Fp8Loops> loops_of_this_machine() {
  std::vector<Fp8Loops> loops;
#if HWY_ARCH_X86
  const auto has_avx2 = [] {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
  };
#if (HWY_TARGETS & HWY_AVX3)
  if (has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd")) {
    loops.push_back(BATON_FP8_LOOPS(N_AVX3));
  }
#endif
#if (HWY_TARGETS & HWY_AVX2)
  if (has_avx2()) loops.push_back(BATON_FP8_LOOPS(N_AVX2));
#endif
#if (HWY_TARGETS & HWY_SSE4)
  if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("aes") &&
      __builtin_cpu_supports("pclmul")) {
    loops.push_back(BATON_FP8_LOOPS(N_SSE4));
  }
#endif
#endif
  // What the compiler may use anyway.
  loops.push_back(BATON_FP8_LOOPS(HWY_NAMESPACE));
  return loops;
}

// Puts the elements of some rows side by side. Element by element: their rows often lie so.
template <size_t kBytes>
void gather(const Fp8Rows& x, size_t rows, std::byte* to) {
  for (size_t i = 0; i < x.width; ++i) {
    for (size_t row = 0; row < rows; ++row) {
      std::memcpy(to + (row * x.width + i) * kBytes,
                  x.from + row * x.from_step + i * x.from_element, kBytes);
    }
  }
}

}  // namespace

std::span<const Fp8Loops> fp8_loops() {
  static const std::vector<Fp8Loops> loops = loops_of_this_machine();
  return loops;
}

void rows_to_fp8(const Fp8Rows& all, const Fp8Loops& by) {
  const auto convert = all.is_fp32 ? by.fp32 : by.bf16;
  const size_t bytes = all.is_fp32 ? 4 : 2;
  const bool gathers = all.from_element != bytes, scatters = all.to_element != 1;
  if (!gathers && !scatters) return convert(all);
  // A thread's own: a plan comes here again for the rows of each block.
  thread_local std::vector<std::byte> memory;
  const size_t gathered = gathers ? kAtOnce * all.width * bytes : 0;
  memory.resize(std::max(memory.size(), gathered + kAtOnce * all.width));
  for (size_t row = 0; row < all.rows; row += kAtOnce) {
    Fp8Rows some = all;
    some.rows = std::min(kAtOnce, all.rows - row);
    some.from += row * all.from_step;
    some.to += row * all.to_step;
    some.scales += row * all.scales_step;
    Fp8Rows together = some;
    if (gathers) {
      if (bytes == 2) {
        gather<2>(some, some.rows, memory.data());
      } else {
        gather<4>(some, some.rows, memory.data());
      }
      together.from = memory.data();
      together.from_step = some.width * bytes;
      together.from_element = bytes;
    }
    if (scatters) {
      together.to = memory.data() + gathered;
      together.to_step = some.width;
      together.to_element = 1;
    }
    convert(together);
    if (!scatters) continue;
    for (size_t i = 0; i < some.rows; ++i) {
      for (size_t j = 0; j < some.width; ++j) {
        some.to[i * some.to_step + j * some.to_element] = together.to[i * some.width + j];
      }
    }
  }
}

}  // namespace baton::kvtransfer
#endif  // HWY_ONCE
