// The loop behind every reduction, for one instruction set. Included by reduce.cc alone.
//
// Lanes say how elements become vectors that can be computed with (small floats: vectors of f32),
// an operation combines two such vectors, and fold_loop() runs it over any number of sources.
#if defined(BATON_COLLECTIVES_REDUCE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BATON_COLLECTIVES_REDUCE_INL_H_
#undef BATON_COLLECTIVES_REDUCE_INL_H_
#else
#define BATON_COLLECTIVES_REDUCE_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::collectives::reduce {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// --- lanes ------------------------------------------------------------------------------------

template <class T>
struct PlainLanes {
  using Element = T;
  using D = hn::ScalableTag<T>;
  static constexpr bool kFloat = std::is_floating_point_v<T>;
  static HWY_INLINE auto load(const T* from) { return hn::LoadU(D(), from); }
  static HWY_INLINE void store(hn::Vec<D> v, T* to) { hn::StoreU(v, D(), to); }
};

using F = hn::ScalableTag<float>;
using U = hn::RebindToUnsigned<F>;
using I = hn::RebindToSigned<F>;
using Narrow = hn::Rebind<uint16_t, F>;  // as many lanes as F

HWY_INLINE hn::Vec<U> load_bits(const uint16_t* from) {
  return hn::PromoteTo(U(), hn::LoadU(Narrow(), from));
}

HWY_INLINE void store_bits(hn::Vec<U> bits, uint16_t* to) {
  hn::StoreU(hn::DemoteTo(Narrow(), hn::BitCast(I(), bits)), Narrow(), to);
}

// Adds what makes cutting off the low `kBits` bits a rounding to nearest even.
template <int kBits>
HWY_INLINE hn::Vec<U> round_bits(hn::Vec<U> bits) {
  const auto odd = hn::And(hn::ShiftRight<kBits>(bits), hn::Set(U(), 1));
  return hn::Add(bits, hn::Add(odd, hn::Set(U(), (1u << (kBits - 1)) - 1)));
}

struct BF16Lanes {
  using Element = uint16_t;
  using D = F;
  static constexpr bool kFloat = true;
  static HWY_INLINE hn::Vec<F> load(const uint16_t* from) {
    return hn::BitCast(F(), hn::ShiftLeft<16>(load_bits(from)));
  }
  static HWY_INLINE void store(hn::Vec<F> v, uint16_t* to) {
    const auto bits = hn::BitCast(U(), v);
    const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(U(), 0x40));
    const auto rounded = hn::ShiftRight<16>(round_bits<16>(bits));
    const auto is_nan = hn::RebindMask(U(), hn::IsNaN(v));
    store_bits(hn::IfThenElse(is_nan, quiet, rounded), to);
  }
};

// A float of 8 or 16 bits, in software: Highway's conversions truncate. `kLargest` is the code of
// the largest number, which what is above becomes, if it is not kInfinity.
template <class T, int kFraction, int kExponent, uint32_t kLargest, uint32_t kInfinity,
          uint32_t kNaN>
struct SmallLanes {
  using Element = T;
  using D = F;
  static constexpr bool kFloat = true;
  using Stored = hn::Rebind<T, F>;
  static constexpr int kBits = 8 * sizeof(T), kCut = 23 - kFraction;
  static constexpr uint32_t kBias = (1u << (kExponent - 1)) - 1, kRebias = (127 - kBias) << 23;
  static constexpr uint32_t kMagnitude = (1u << (kBits - 1)) - 1;
  // Denormals are multiples of this.
  static constexpr float kUnit = 2.0f / static_cast<float>(uint64_t{1} << (kBias + kFraction));

  static HWY_INLINE hn::Vec<F> load(const T* from) {
    const auto code = hn::PromoteTo(U(), hn::LoadU(Stored(), from));
    const auto sign = hn::ShiftLeft<32 - kBits>(hn::And(code, hn::Set(U(), kMagnitude + 1)));
    const auto magnitude = hn::And(code, hn::Set(U(), kMagnitude));
    auto bits = hn::Add(hn::ShiftLeft<kCut>(magnitude), hn::Set(U(), kRebias));
    // Infinities and NaN.
    const auto special = hn::Gt(magnitude, hn::Set(U(), kInfinity - 1));
    bits = hn::IfThenElse(
        special,
        kInfinity == kNaN ? hn::Set(U(), 0x7FC00000) : hn::Add(bits, hn::Set(U(), kRebias)), bits);
    const auto tiny = hn::Mul(hn::ConvertTo(F(), hn::BitCast(I(), magnitude)), hn::Set(F(), kUnit));
    const auto denormal = hn::Lt(magnitude, hn::Set(U(), 1u << kFraction));
    bits = hn::IfThenElse(denormal, hn::BitCast(U(), tiny), bits);
    return hn::BitCast(F(), hn::Or(bits, sign));
  }
  static HWY_INLINE void store(hn::Vec<F> v, T* to) {
    const auto all = hn::BitCast(U(), v);
    const auto sign = hn::ShiftRight<32 - kBits>(hn::And(all, hn::Set(U(), 0x80000000u)));
    const auto bits = hn::And(all, hn::Set(U(), 0x7FFFFFFFu));
    auto code = hn::ShiftRight<kCut>(hn::Sub(round_bits<kCut>(bits), hn::Set(U(), kRebias)));
    // The ulp of this in f32 is that of the denormals: adding it rounds to them.
    const auto rounder = hn::Set(F(), kUnit * 0x1p23f);
    const auto tiny = hn::Sub(hn::BitCast(U(), hn::Add(hn::BitCast(F(), bits), rounder)),
                              hn::BitCast(U(), rounder));
    code = hn::IfThenElse(hn::Lt(bits, hn::Set(U(), kRebias + (1u << 23))), tiny, code);
    // Larger than any magnitude that has not wrapped.
    code = hn::Min(code, hn::Set(U(), kLargest));
    code = hn::IfThenElse(hn::Gt(bits, hn::Set(U(), 0x7F7FFFFF)), hn::Set(U(), kInfinity), code);
    code = hn::IfThenElse(hn::Gt(bits, hn::Set(U(), 0x7F800000)), hn::Set(U(), kNaN), code);
    hn::StoreU(hn::DemoteTo(Stored(), hn::BitCast(I(), hn::Or(code, sign))), Stored(), to);
  }
};
using E4M3Lanes = SmallLanes<uint8_t, 3, 4, 0x7E, 0x7F, 0x7F>;
using E5M2Lanes = SmallLanes<uint8_t, 2, 5, 0x7B, 0x7C, 0x7E>;

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
struct F16Lanes {
  using Element = uint16_t;
  using D = F;
  static constexpr bool kFloat = true;
  using Half = hn::Rebind<hwy::float16_t, F>;
  static HWY_INLINE hn::Vec<F> load(const uint16_t* from) {
    return hn::PromoteTo(F(), hn::BitCast(Half(), hn::LoadU(Narrow(), from)));
  }
  static HWY_INLINE void store(hn::Vec<F> v, uint16_t* to) {
    hn::StoreU(hn::BitCast(Narrow(), hn::DemoteTo(Half(), v)), Narrow(), to);
  }
};
#else
using F16Lanes = SmallLanes<uint16_t, 10, 5, 0x7C00, 0x7C00, 0x7E00>;
#endif

// Truth values: any byte but 0 is 1.
struct BoolLanes {
  using Element = uint8_t;
  using D = hn::ScalableTag<uint8_t>;
  static constexpr bool kFloat = false;
  static HWY_INLINE auto load(const uint8_t* from) {
    return hn::Min(hn::LoadU(D(), from), hn::Set(D(), 1));
  }
  static HWY_INLINE void store(hn::Vec<D> v, uint8_t* to) { hn::StoreU(v, D(), to); }
};

// --- operations -------------------------------------------------------------------------------

struct Sum {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Add(a, b);
  }
};

struct Prod {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    using T = hn::TFromV<V>;
    if constexpr (sizeof(T) == 1 && hn::MaxLanes(hn::DFromV<V>()) == 1) {
      return hn::Set(hn::DFromV<V>(), static_cast<T>(hn::GetLane(a) * hn::GetLane(b)));
    } else if constexpr (sizeof(T) == 1) {  // no CPU multiplies bytes: even and odd ones apart
      const hn::RepartitionToWide<hn::DFromV<V>> wide;
      const auto x = hn::BitCast(wide, a), y = hn::BitCast(wide, b);
      const auto low = hn::Set(wide, 0xFF);
      const auto even = hn::Mul(hn::And(x, low), hn::And(y, low));
      const auto odd = hn::Mul(hn::ShiftRight<8>(x), hn::ShiftRight<8>(y));
      return hn::BitCast(hn::DFromV<V>(), hn::Or(hn::And(even, low), hn::ShiftLeft<8>(odd)));
    } else {
      return hn::Mul(a, b);
    }
  }
};

// For floats do not use the min and max of the instruction sets: those differ in NaN and in zeros.
struct Min {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    if constexpr (std::is_floating_point_v<hn::TFromV<V>>) {
      const V less = hn::IfThenElse(hn::Or(hn::Lt(a, b), hn::IsNaN(a)), a, b);
      return hn::IfThenElse(hn::Eq(a, b), hn::Or(a, b), less);  // -0 is below +0
    } else {
      return hn::Min(a, b);
    }
  }
};

struct Max {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    if constexpr (std::is_floating_point_v<hn::TFromV<V>>) {
      const V more = hn::IfThenElse(hn::Or(hn::Gt(a, b), hn::IsNaN(a)), a, b);
      return hn::IfThenElse(hn::Eq(a, b), hn::And(a, b), more);
    } else {
      return hn::Max(a, b);
    }
  }
};

struct And {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::And(a, b);
  }
};

struct Or {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Or(a, b);
  }
};

struct Xor {
  template <class V>
  HWY_INLINE V operator()(V a, V b) const {
    return hn::Xor(a, b);
  }
};

// --- the loop ---------------------------------------------------------------------------------

// target = sources[0] (+) sources[1] (+) ... / divide_by. `kSources` > 0: exactly so many, known
// when compiling. Only floats are divided here.
template <class Lanes, class Operation, size_t kSources>
HWY_NOINLINE void fold_loop(void* target, const void* const* source_list, size_t source_count,
                            size_t count, uint32_t divide_by) {
  using T = typename Lanes::Element;
  using D = typename Lanes::D;
  using V = hn::Vec<D>;
  const D d;
  const Operation combine;
  const size_t sources = kSources > 0 ? kSources : source_count;
  const size_t lanes = hn::Lanes(d);
  T* const out = static_cast<T*>(target);
  const T* first = static_cast<const T*>(source_list[0]);
  const T* second = sources > 1 ? static_cast<const T*>(source_list[1]) : nullptr;
  const bool divides = Lanes::kFloat && divide_by > 1;
  const V divisor = hn::Set(d, static_cast<hn::TFromD<D>>(divide_by));
  const auto finish = [&](V v) HWY_ATTR {
    if constexpr (Lanes::kFloat) {
      if (divides) v = hn::Div(v, divisor);
    }
    return v;
  };

  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    V v0 = Lanes::load(first + i), v1 = Lanes::load(first + i + lanes),
      v2 = Lanes::load(first + i + 2 * lanes), v3 = Lanes::load(first + i + 3 * lanes);
    for (size_t s = 1; s < sources; ++s) {
      const T* const from = (s == 1 ? second : static_cast<const T*>(source_list[s])) + i;
      v0 = combine(v0, Lanes::load(from));
      v1 = combine(v1, Lanes::load(from + lanes));
      v2 = combine(v2, Lanes::load(from + 2 * lanes));
      v3 = combine(v3, Lanes::load(from + 3 * lanes));
    }
    Lanes::store(finish(v0), out + i);
    Lanes::store(finish(v1), out + i + lanes);
    Lanes::store(finish(v2), out + i + 2 * lanes);
    Lanes::store(finish(v3), out + i + 3 * lanes);
  }
  // The rest: whole vectors, then one that goes through a buffer.
  T padded[hn::MaxLanes(d)] = {};
  for (; i < count; i += lanes) {
    const size_t left = count - i < lanes ? count - i : lanes;
    const auto load = [&](const void* from) HWY_ATTR {
      const T* const at = static_cast<const T*>(from) + i;
      if (left == lanes) return Lanes::load(at);
      std::memcpy(padded, at, left * sizeof(T));
      return Lanes::load(padded);
    };
    V v = load(first);
    for (size_t s = 1; s < sources; ++s) v = combine(v, load(source_list[s]));
    v = finish(v);
    if (left == lanes) {
      Lanes::store(v, out + i);
    } else {
      Lanes::store(v, padded);
      std::memcpy(out + i, padded, left * sizeof(T));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::collectives::reduce
HWY_AFTER_NAMESPACE();

#endif  // include guard per target
