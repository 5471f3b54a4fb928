// rows_to_fp8: one loop for the largest magnitude of a row, one for its codes, for every
// instruction set; and rows whose elements lie apart are put together first.
#include "kvtransfer/plans/fp8_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kvtransfer/kv_requantise.h"

// AVX-512, AVX2, SSE4 and a fallback are enough; fewer targets compile faster.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kvtransfer/plans/fp8_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/cache_control.h"
#include "hwy/highway.h"

#ifndef BATON_KVTRANSFER_PLANS_FP8_ROWS_ONCE
#define BATON_KVTRANSFER_PLANS_FP8_ROWS_ONCE
namespace baton::kvtransfer {

// As numbers, since it may not be mapped.
inline void ask_for(const std::byte* from, size_t ahead, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(from) + ahead;
  for (size_t at = 0; at < bytes; at += 64) {
    hwy::Prefetch(reinterpret_cast<const std::byte*>(begin + at));
  }
}

}  // namespace baton::kvtransfer
#endif

HWY_BEFORE_NAMESPACE();
namespace baton::kvtransfer {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

// One element after the other. A machine of today has better.
template <bool kFp32>
void convert_rows(const Fp8Rows& x) {
  const size_t span = x.width / x.scales_of_row;
  const auto element = [](const std::byte* at) {
    uint32_t bits = 0;
    if (kFp32) {
      std::memcpy(&bits, at, 4);
    } else {
      uint16_t half;
      std::memcpy(&half, at, 2);
      bits = uint32_t{half} << 16;
    }
    return std::bit_cast<float>(bits);
  };
  for (size_t i = 0; i < x.rows * x.scales_of_row; ++i) {
    const size_t row = i / x.scales_of_row, s = i % x.scales_of_row;
    const std::byte* from = x.from + row * x.from_step + s * span * x.from_element;
    float largest = 0;
    for (size_t j = 0; j < span; ++j) {
      const float magnitude = std::fabs(element(from + j * x.from_element));
      if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
    }
    const float scale = scale_for(largest);
    std::memcpy(x.scales + row * x.scales_step + s * x.scale_element, &scale, sizeof scale);
    std::byte* to = x.to + row * x.to_step + s * span;
    for (size_t j = 0; j < span; ++j) {
      to[j] = static_cast<std::byte>(fp8_e4m3_of(element(from + j * x.from_element) / scale));
    }
  }
}

void convert_bf16(const Fp8Rows& rows) { convert_rows<false>(rows); }
void convert_fp32(const Fp8Rows& rows) { convert_rows<true>(rows); }

void transpose_eight(const std::byte* from, size_t from_element, size_t width, std::byte* to) {
  for (size_t i = 0; i < width * 8; ++i) {
    std::memcpy(to + (i % 8 * width + i / 8) * 2, from + i / 8 * from_element + i % 8 * 2, 2);
  }
}

#else

using F = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F>;
using U16 = hn::Repartition<uint16_t, F>;
using Bytes = hn::Repartition<uint8_t, F>;

constexpr uint32_t kInfinity = 0x7f800000, kMagnitude = 0x7fffffff;

// In the lowest byte, the codes of magnitudes up to 448 (and a little: scales are rounded), and
// kExcess; anything above it.
// Adding 2^20 times the power of two below a magnitude, or below the smallest normal e4m3 number,
// rounds it to the digits that a code has, ties to even, and leaves them in the lowest bits: 8 to
// 16 of a normal number, 0 to 8 below. The power counts eights, and is none of the lowest 23 bits.
constexpr uint32_t kExcess = (121 + 20) * 8 % 256;

HWY_INLINE hn::Vec<U32> codes_of(hn::Vec<F> magnitude) {
  const U32 u32;
  const F f;
  constexpr uint32_t kExponent = 0x7f800000, kSmallestNormal = 121u << 23, kTwenty = 20u << 23;
  const auto power = hn::And(hn::BitCast(u32, magnitude), hn::Set(u32, kExponent));
  const auto adds =
      hn::BitCast(f, hn::Add(hn::Max(power, hn::Set(u32, kSmallestNormal)), hn::Set(u32, kTwenty)));
  const auto rounded = hn::BitCast(u32, hn::Add(magnitude, adds));
  return hn::Add(rounded, hn::ShiftRight<20>(rounded));
}

// value / scale, rounded once. Where multiply-adds are fused some of them are the same number and
// take a fraction of the time: 1 / scale is rounded correctly, the first correction of the quotient
// leaves it within one unit, whose remainder is exact, and then the second one rounds it correctly
// (Markstein). That holds as long as remainders are no subnormal numbers; of quotients for which
// they could be, every code is 0, if the scale is at least kLeastFused. Of bf16 numbers by the
// scale of one, the first correction is enough: kv_requantise_test tries all.
constexpr float kLeastFused = 0x1p-60f;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

struct Divisor {
  template <int kCorrections>  // 0: divides
  HWY_INLINE hn::Vec<F> divide(hn::Vec<F> value) const {
    if constexpr (kCorrections == 0) return hn::Div(value, scale);
    auto quotient = hn::Mul(value, inverse);
    for (int i = 0; i < kCorrections; ++i) {
      quotient = hn::MulAdd(hn::NegMulAdd(quotient, scale, value), inverse, quotient);
    }
    return quotient;
  }
  hn::Vec<F> scale, inverse;
};

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const std::byte* from) {
  return hn::BitCast(d, hn::LoadU(Bytes(), reinterpret_cast<const uint8_t*>(from)));
}

// bf16: a vector of 16-bit elements at once, whose even and odd ones are two vectors of fp32.
struct Bf16 {
  using Block = U16;
  static constexpr size_t kBytes = 2;

  static HWY_INLINE hn::Vec<U16> magnitudes(hn::Vec<U16> bits) {
    return hn::And(bits, hn::Set(U16(), kMagnitude >> 16));
  }
  static HWY_INLINE auto not_finite(hn::Vec<U16> magnitude) {
    // Signed: no instruction set before AVX-512 compares unsigned ones, and none has the top bit.
    const hn::RebindToSigned<U16> i16;
    return hn::RebindMask(U16(), hn::Gt(hn::BitCast(i16, magnitude),
                                        hn::Set(i16, static_cast<int16_t>((kInfinity >> 16) - 1))));
  }
  static HWY_INLINE uint32_t largest(hn::Vec<U16> magnitude) {
    const U32 u32;
    const auto pairs = hn::BitCast(u32, magnitude);
    const auto either = hn::Max(hn::ShiftRight<16>(pairs), hn::And(pairs, hn::Set(u32, 0xffff)));
    return hn::GetLane(hn::MaxOfLanes(u32, either)) << 16;
  }
  template <bool kPlain>
  static HWY_INLINE void convert(hn::Vec<U16> bits, const Divisor& scale, uint8_t* to) {
    const F f;
    const U16 u16;
    const U32 u32;
    auto magnitude = magnitudes(bits);
    const auto bad = not_finite(magnitude);
    if (!kPlain) magnitude = hn::IfThenZeroElse(bad, magnitude);
    const auto pairs = hn::BitCast(u32, magnitude);
    const auto even = hn::BitCast(f, hn::ShiftLeft<16>(pairs));
    const auto odd = hn::BitCast(f, hn::And(pairs, hn::Set(u32, 0xffff0000)));
    constexpr int kCorrections = kPlain && kFused ? 1 : 0;
    const auto low = codes_of(scale.divide<kCorrections>(even));
    const auto high = hn::ShiftLeft<16>(codes_of(scale.divide<kCorrections>(odd)));
    const auto both = hn::BitCast(u16, hn::OrAnd(high, low, hn::Set(u32, 0xffff)));
    auto codes = hn::Sub(both, hn::Set(u16, kExcess));
    if (!kPlain) codes = hn::IfThenElse(bad, hn::Set(u16, 0x7f), codes);
    codes = hn::Or(codes, hn::And(hn::ShiftRight<8>(bits), hn::Set(u16, 0x80)));
    const hn::Rebind<uint8_t, U16> u8;
    hn::StoreU(hn::TruncateTo(u8, codes), u8, to);
  }
};

struct Fp32 {
  using Block = U32;
  static constexpr size_t kBytes = 4;

  static HWY_INLINE hn::Vec<U32> magnitudes(hn::Vec<U32> bits) {
    return hn::And(bits, hn::Set(U32(), kMagnitude));
  }
  static HWY_INLINE auto not_finite(hn::Vec<U32> magnitude) {
    const hn::RebindToSigned<U32> i32;
    return hn::RebindMask(U32(), hn::Gt(hn::BitCast(i32, magnitude),
                                        hn::Set(i32, static_cast<int32_t>(kInfinity - 1))));
  }
  static HWY_INLINE uint32_t largest(hn::Vec<U32> magnitude) {
    return hn::GetLane(hn::MaxOfLanes(U32(), magnitude));
  }
  template <bool kPlain>
  static HWY_INLINE void convert(hn::Vec<U32> bits, const Divisor& scale, uint8_t* to) {
    const U32 u32;
    auto magnitude = magnitudes(bits);
    const auto bad = not_finite(magnitude);
    if (!kPlain) magnitude = hn::IfThenZeroElse(bad, magnitude);
    auto codes = hn::Sub(codes_of(scale.divide < kPlain && kFused > (hn::BitCast(F(), magnitude))),
                         hn::Set(u32, kExcess));
    if (!kPlain) codes = hn::IfThenElse(bad, hn::Set(u32, 0x7f), codes);
    codes = hn::Or(codes, hn::And(hn::ShiftRight<24>(bits), hn::Set(u32, 0x80)));
    const hn::Rebind<uint8_t, U32> u8;
    hn::StoreU(hn::TruncateTo(u8, codes), u8, to);
  }
};

// Elements that share a scale, side by side. What is left over of vectors goes through memory of a
// whole one, behind which there are zeros. kPlain: all are finite, and the scale at least
// kLeastFused.
template <class Type, bool kPlain>
HWY_INLINE void convert_span(const std::byte* HWY_RESTRICT from, size_t count, const Divisor& scale,
                             std::byte* HWY_RESTRICT to) {
  using Block = typename Type::Block;
  const Block block;
  const size_t lanes = hn::Lanes(block);
  auto* out = reinterpret_cast<uint8_t*>(to);
  size_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    Type::template convert<kPlain>(load(block, from + at * Type::kBytes), scale, out + at);
  }
  if (at == count) return;
  HWY_ALIGN std::byte rest[hn::MaxLanes(Bytes())] = {};
  HWY_ALIGN uint8_t codes[hn::MaxLanes(Bytes())];
  std::memcpy(rest, from + at * Type::kBytes, (count - at) * Type::kBytes);
  Type::template convert<kPlain>(load(block, rest), scale, codes);
  std::memcpy(out + at, codes, count - at);
}

// The bits of the largest magnitude; with kAllFinite unset infinities and NaN count as zero.
template <class Type, bool kAllFinite>
HWY_INLINE uint32_t largest_of(const std::byte* HWY_RESTRICT from, size_t count) {
  using Block = typename Type::Block;
  const Block block;
  const size_t lanes = hn::Lanes(block);
  const auto look = [](hn::Vec<Block> bits) {
    const auto magnitude = Type::magnitudes(bits);
    return kAllFinite ? magnitude : hn::IfThenZeroElse(Type::not_finite(magnitude), magnitude);
  };
  auto most = hn::Zero(block);
  size_t at = 0;
  for (; at + lanes <= count; at += lanes) {
    most = hn::Max(most, look(load(block, from + at * Type::kBytes)));
  }
  if (at < count) {
    HWY_ALIGN std::byte rest[hn::MaxLanes(Bytes())] = {};
    std::memcpy(rest, from + at * Type::kBytes, (count - at) * Type::kBytes);
    most = hn::Max(most, look(load(block, rest)));
  }
  return Type::largest(most);
}

// The scales of some largest magnitudes (bits), and 1 / them.
constexpr size_t kTogether = 16;
struct Spans {
  HWY_ALIGN uint32_t largest[kTogether] = {};
  HWY_ALIGN float scale[kTogether], inverse[kTogether];
  void divide() {
    const F f;
    const auto one = hn::Set(f, 1.0f), least = hn::Set(f, std::numeric_limits<float>::min());
    for (size_t i = 0; i < kTogether; i += hn::Lanes(f)) {
      const auto most = hn::BitCast(f, hn::Load(U32(), largest + i));
      auto scales = hn::Max(hn::Div(most, hn::Set(f, 448.0f)), least);
      scales = hn::IfThenElse(hn::Eq(most, hn::Zero(f)), one, scales);
      hn::Store(scales, f, scale + i);
      hn::Store(hn::Div(one, scales), f, inverse + i);
    }
  }
};

// All of a step for some spans, then the next step: what a scale waits for, another one does not.
template <class Type>
void convert_rows(const Fp8Rows& x) {
  const size_t span = x.width / x.scales_of_row;
  struct Place {
    const std::byte* from;
    std::byte *to, *scale;
  } places[kTogether];
  Spans spans;
  size_t row = 0, s = 0;
  while (row < x.rows) {
    size_t count = 0;
    for (; count < kTogether && row < x.rows; ++count) {
      places[count] = {x.from + row * x.from_step + s * span * Type::kBytes,
                       x.to + row * x.to_step + s * span,
                       x.scales + row * x.scales_step + s * x.scale_element};
      if (x.ahead != 0) ask_for(places[count].from, x.ahead, span * Type::kBytes);
      spans.largest[count] = largest_of<Type, true>(places[count].from, span);
      if (++s == x.scales_of_row) s = 0, ++row;
    }
    uint32_t plain = 0;
    for (size_t i = 0; i < count; ++i) {
      if (HWY_LIKELY(spans.largest[i] < kInfinity)) {
        plain |= 1u << i;
      } else {
        spans.largest[i] = largest_of<Type, false>(places[i].from, span);
      }
    }
    spans.divide();
    for (size_t i = 0; i < count; ++i) {
      const Divisor by = {hn::Set(F(), spans.scale[i]), hn::Set(F(), spans.inverse[i])};
      std::memcpy(places[i].scale, &spans.scale[i], sizeof(float));
      if (HWY_LIKELY((plain >> i & 1) != 0 && spans.scale[i] >= kLeastFused)) {
        convert_span<Type, true>(places[i].from, span, by, places[i].to);
      } else {
        convert_span<Type, false>(places[i].from, span, by, places[i].to);
      }
    }
  }
}

void convert_bf16(const Fp8Rows& rows) { convert_rows<Bf16>(rows); }
void convert_fp32(const Fp8Rows& rows) { convert_rows<Fp32>(rows); }

// Eight rows of bf16 that lie side by side, element by element: an 8 x 8 block is three rounds of
// interleaving. `to`: rows of `width` elements.
void transpose_eight(const std::byte* HWY_RESTRICT from, size_t from_element, size_t width,
                     std::byte* HWY_RESTRICT to) {
  const hn::CappedTag<uint8_t, 16> bytes;
  const hn::Repartition<uint16_t, decltype(bytes)> u16;
  const hn::Repartition<uint32_t, decltype(bytes)> u32;
  const hn::Repartition<uint64_t, decltype(bytes)> u64;
  using V = hn::Vec<decltype(u16)>;
  size_t at = 0;
  for (; at + 8 <= width; at += 8) {
    V a[8], b[8];
    for (size_t i = 0; i < 8; ++i) {
      a[i] = hn::BitCast(
          u16, hn::LoadU(bytes, reinterpret_cast<const uint8_t*>(from + (at + i) * from_element)));
    }
    for (size_t i = 0; i < 4; ++i) {  // pairs of elements: rows 0 to 3, and 4 to 7
      b[i] = hn::InterleaveLower(u16, a[2 * i], a[2 * i + 1]);
      b[4 + i] = hn::InterleaveUpper(u16, a[2 * i], a[2 * i + 1]);
    }
    for (size_t i = 0; i < 2; ++i) {  // fours of elements, two rows in each
      for (size_t half = 0; half < 2; ++half) {
        const auto low = hn::BitCast(u32, b[4 * half + 2 * i]);
        const auto high = hn::BitCast(u32, b[4 * half + 2 * i + 1]);
        a[4 * half + i] = hn::BitCast(u16, hn::InterleaveLower(u32, low, high));
        a[4 * half + 2 + i] = hn::BitCast(u16, hn::InterleaveUpper(u32, low, high));
      }
    }
    for (size_t pair = 0; pair < 4; ++pair) {  // eights, one row in each
      const auto low = hn::BitCast(u64, a[2 * pair]), high = hn::BitCast(u64, a[2 * pair + 1]);
      std::byte* const first = to + (2 * pair * width + at) * 2;
      hn::StoreU(hn::BitCast(bytes, hn::InterleaveLower(u64, low, high)), bytes,
                 reinterpret_cast<uint8_t*>(first));
      hn::StoreU(hn::BitCast(bytes, hn::InterleaveUpper(u64, low, high)), bytes,
                 reinterpret_cast<uint8_t*>(first + 2 * width));
    }
  }
  for (; at < width; ++at) {
    for (size_t row = 0; row < 8; ++row) {
      std::memcpy(to + (row * width + at) * 2, from + at * from_element + row * 2, 2);
    }
  }
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace baton::kvtransfer
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::kvtransfer {

namespace {

constexpr size_t kAtOnce = 8;

#define BATON_FP8_NAME(target) #target
#define BATON_FP8_LOOPS(target)                                                                 \
  Fp8Loops {                                                                                    \
    BATON_FP8_NAME(target), target::convert_bf16, target::convert_fp32, target::transpose_eight \
  }

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
      if (bytes == 2 && some.from_step == 2 && some.rows == kAtOnce) {
        // In a block of several eights, each eight prefetches a part.
        const size_t part = some.width * some.from_element * kAtOnce / std::max(all.rows, kAtOnce);
        if (all.ahead != 0) {
          ask_for(all.from, all.ahead + row / kAtOnce * part, part);
        }
        by.transpose_eight(some.from, some.from_element, some.width, memory.data());
      } else if (bytes == 2) {
        gather<2>(some, some.rows, memory.data());
      } else {
        gather<4>(some, some.rows, memory.data());
      }
      together.from = memory.data();
      together.ahead = 0;
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
