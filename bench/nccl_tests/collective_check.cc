// Inputs and expected results of collectives, element by element.
#include "bench/nccl_tests/collective_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "transport/base/splitmix.h"

namespace baton::bench {
namespace {

// The same at all ranks; and of one rank.
uint64_t shared_hash(uint64_t call, size_t index) {
  return base::splitmix_hash(call * base::kSplitmixStep + index + 1);
}
uint64_t rank_hash(uint64_t shared, int rank) {
  return base::splitmix_hash(shared + (static_cast<uint64_t>(rank) + 1) * base::kSplitmixStep);
}

// --- types ------------------------------------------------------------------------------------

struct F16 {
  uint16_t bits;
  static constexpr int kSignificand = 11, kLowestExponent = -14;
};
struct BF16 {
  uint16_t bits;
  static constexpr int kSignificand = 8, kLowestExponent = -126;
};
struct E4M3 {
  uint8_t bits;
  static constexpr int kSignificand = 4, kLowestExponent = -6;
};
struct E5M2 {
  uint8_t bits;
  static constexpr int kSignificand = 3, kLowestExponent = -14;
};

template <class T>
constexpr bool kIsFloat = !std::is_integral_v<T>;

template <class T>
constexpr int significand_bits() {
  if constexpr (std::is_arithmetic_v<T>) {
    return std::numeric_limits<T>::digits;
  } else {
    return T::kSignificand;
  }
}

template <class T>
constexpr int lowest_exponent() {
  if constexpr (std::is_arithmetic_v<T>) {
    return std::numeric_limits<T>::min_exponent - 1;
  } else {
    return T::kLowestExponent;
  }
}

// To the nearest, ties to even. Floats of 8 and 16 bits come from f32, as their results do; here
// they are never too large.
template <class T>
T encode(double value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value);
  } else {
    uint32_t bits = 0;
    const float single = static_cast<float>(value);
    std::memcpy(&bits, &single, sizeof bits);
    constexpr int kCut = 24 - T::kSignificand;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t rounded = (magnitude + ((magnitude >> kCut) & 1) + ((1u << (kCut - 1)) - 1)) >> kCut;
    constexpr uint32_t kRebias = static_cast<uint32_t>(127 - (1 - T::kLowestExponent))
                                 << (T::kSignificand - 1);
    rounded -= kRebias;
    if (std::fabs(single) < std::ldexp(1.0F, T::kLowestExponent)) {
      // The last place of this one is that of all numbers below the normal ones.
      const float coarse = std::ldexp(1.0F, T::kLowestExponent + kCut);
      const float sum = std::fabs(single) + coarse;
      uint32_t low = 0, high = 0;
      std::memcpy(&low, &coarse, sizeof low);
      std::memcpy(&high, &sum, sizeof high);
      rounded = high - low;
    }
    constexpr int kBits = 8 * sizeof(T);
    return {static_cast<decltype(T::bits)>((bits >> 31 << (kBits - 1)) | rounded)};
  }
}

// --- values -----------------------------------------------------------------------------------

// The limit of values so that combinations of `ranks` floats stay exact. (Integers wrap and need no
// limit.)
template <class T>
struct Budget {
  explicit Budget(int ranks)
      : share((int64_t{1} << kRoom) / ranks),
        sum_stride(stride(ranks, int64_t{1} << kRoom)),
        product_stride(stride(ranks, std::max(1, -lowest_exponent<T>() - 2))) {}
  static constexpr int kRoom = std::min(significand_bits<T>(), 31);
  // No more than `room` of the ranks are multiples of the stride.
  static uint64_t stride(int ranks, int64_t room) {
    return static_cast<uint64_t>((ranks + room - 1) / room);
  }

  int64_t share;  // of the significand, for each rank; 0: only some ranks contribute to sums
  uint64_t sum_stride;
  uint64_t product_stride;  // shifts the exponent of a product
};

// A float that a sum can be made of: a multiple of a power of two, the same for all ranks.
template <class T>
double summand(const Budget<T>& budget, uint64_t shared, int rank) {
  constexpr std::array kUnits = {0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0};
  const uint64_t own = rank_hash(shared, rank);
  int64_t multiple = 0;
  if (budget.share > 0) {
    const uint64_t range = 2 * static_cast<uint64_t>(budget.share) + 1;
    multiple = static_cast<int64_t>((own >> 32) * range >> 32) - budget.share;
  } else if ((static_cast<uint64_t>(rank) + shared % budget.sum_stride) % budget.sum_stride == 0) {
    multiple = (own & 1) != 0 ? 1 : -1;
  }
  return static_cast<double>(multiple) * kUnits[shared >> 61];
}

// A float that a product can be made of: a power of two near one, and at one rank an odd factor.
template <class T>
double factor(const Budget<T>& budget, uint64_t shared, int rank, int ranks) {
  constexpr std::array kPowers = {0.5, 1.0, 2.0};
  const uint64_t own = rank_hash(shared, rank);
  const uint64_t turn = static_cast<uint64_t>(rank) + shared % budget.product_stride;
  const double power = turn % budget.product_stride == 0 ? kPowers[own % 3] : 1;
  const bool odd = static_cast<int>((shared >> 32) % static_cast<uint64_t>(ranks)) == rank;
  constexpr uint64_t kFractions = 1U << std::min(7, significand_bits<T>() - 1);
  const double fraction =
      odd ? static_cast<double>((own >> 8) % kFractions) / static_cast<double>(kFractions) : 0;
  return ((own >> 40 & 1) != 0 ? -power : power) * (1 + fraction);
}

template <class T>
struct Values {
  const CollectiveCase& c;
  const Budget<T> budget{c.ranks};
  const bool reduces = c.collective == Measured::kAllReduce ||
                       c.collective == Measured::kReduceScatter ||
                       c.collective == Measured::kReduce;

  double contribution(uint64_t shared, int rank) const {
    return c.op == ReduceOp::kProd ? factor(budget, shared, rank, c.ranks)
                                   : summand(budget, shared, rank);
  }

  // What the rank multiplies it by.
  T multiplier(int rank) const {
    if constexpr (kIsFloat<T>) {
      return encode<T>(multiplier_value(rank));
    } else {
      return static_cast<T>(2 * rank + 3);
    }
  }
  static double multiplier_value(int rank) { return rank % 3 == 0 ? -2 : 2; }
  double weighted(uint64_t shared, int rank) const {
    const double value = contribution(shared, rank);
    return c.op == ReduceOp::kPreMulSum ? multiplier_value(rank) * value : value;
  }
  T weighted_input(int rank, size_t index) const {
    const T value = input(rank, index);
    if constexpr (!std::is_same_v<T, bool> && !kIsFloat<T>) {
      if (c.op == ReduceOp::kPreMulSum) return wrapped(value, multiplier(rank), true);
    }
    return value;
  }

  // Element `index` of the input of `rank`. What is only moved may be any bits.
  T input(int rank, size_t index) const {
    const uint64_t shared = shared_hash(c.call, index);
    if constexpr (kIsFloat<T>) {
      if (reduces) return encode<T>(contribution(shared, rank));
    }
    const uint64_t own = rank_hash(shared, rank);
    if constexpr (std::is_same_v<T, bool>) {
      return (own & 1) != 0;
    } else {
      T value;
      std::memcpy(&value, &own, sizeof value);
      return value;
    }
  }

  T reduced(size_t index) const {
    const uint64_t shared = shared_hash(c.call, index);
    if constexpr (kIsFloat<T>) {
      double value = weighted(shared, 0);
      for (int rank = 1; rank < c.ranks; ++rank) value = combine(value, weighted(shared, rank));
      // All sums are exact. Dividing rounds: f64 in f64, the others in f32.
      if (c.op != ReduceOp::kAvg) return encode<T>(value);
      if constexpr (std::is_same_v<T, double>) {
        return value / c.ranks;
      } else {
        return encode<T>(static_cast<float>(value) / static_cast<float>(c.ranks));
      }
    } else {
      T value = weighted_input(0, index);
      for (int rank = 1; rank < c.ranks; ++rank) {
        value = combine(value, weighted_input(rank, index));
      }
      using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
      return c.op == ReduceOp::kAvg ? static_cast<T>(value / static_cast<Wide>(c.ranks)) : value;
    }
  }

  template <class V>
  static V wrapped(V a, V b, bool multiplies) {
    if constexpr (std::is_same_v<V, bool>) {
      return multiplies ? a && b : a || b;
    } else {
      using Bits = std::make_unsigned_t<V>;  // which wrap around, and widen without a sign
      const uint64_t x = static_cast<Bits>(a), y = static_cast<Bits>(b);
      return static_cast<V>(multiplies ? x * y : x + y);
    }
  }

  template <class V>
  V combine(V a, V b) const {
    if (c.op == ReduceOp::kMin) return std::min(a, b);
    if (c.op == ReduceOp::kMax) return std::max(a, b);
    if constexpr (std::is_integral_v<V>) {
      if (c.op == ReduceOp::kAnd) return static_cast<V>(a & b);
      if (c.op == ReduceOp::kOr) return static_cast<V>(a | b);
      if (c.op == ReduceOp::kXor) return static_cast<V>(a ^ b);
      return wrapped(a, b, c.op == ReduceOp::kProd);
    } else {
      return c.op == ReduceOp::kProd ? a * b : a + b;
    }
  }

  // Element `index` of the output of `rank`.
  T output(int rank, size_t index, size_t count) const {
    switch (c.collective) {
      case Measured::kReduceScatter:
        return reduced(static_cast<size_t>(rank) * count + index);
      case Measured::kAllGather:
      case Measured::kGather:
      case Measured::kHypercube:
        return input(static_cast<int>(index / count), index % count);
      case Measured::kScatter:
        return input(c.root, static_cast<size_t>(rank) * count + index);
      case Measured::kAllToAll:
        return input(static_cast<int>(index / count),
                     static_cast<size_t>(rank) * count + index % count);
      case Measured::kBroadcast:
        return input(c.root, index);
      case Measured::kSendReceive:
        return input((rank + c.ranks - 1) % c.ranks, index);
      default:
        return reduced(index);
    }
  }
};

// Calls `visit` with Values of the type.
template <class Visit>
auto with_type(const CollectiveCase& c, const Visit& visit) {
  switch (c.type) {
    case DataType::kF16:
      return visit(Values<F16>{c});
    case DataType::kBF16:
      return visit(Values<BF16>{c});
    case DataType::kF64:
      return visit(Values<double>{c});
    case DataType::kI8:
      return visit(Values<int8_t>{c});
    case DataType::kU8:
      return visit(Values<uint8_t>{c});
    case DataType::kI32:
      return visit(Values<int32_t>{c});
    case DataType::kI64:
      return visit(Values<int64_t>{c});
    case DataType::kF8E4M3:
      return visit(Values<E4M3>{c});
    case DataType::kF8E5M2:
      return visit(Values<E5M2>{c});
    case DataType::kU32:
      return visit(Values<uint32_t>{c});
    case DataType::kU64:
      return visit(Values<uint64_t>{c});
    case DataType::kBool:  // of what is only moved every bit tells
      return Values<bool>{c}.reduces ? visit(Values<bool>{c}) : visit(Values<uint8_t>{c});
    default:
      return visit(Values<float>{c});
  }
}

// By their bits.
template <class T, class Expected>
uint64_t differing(const void* data, size_t count, const Expected& expected) {
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const T want = expected(i);
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): -0 is not 0, a NaN is itself
    wrong += std::memcmp(static_cast<const T*>(data) + i, &want, sizeof want) == 0 ? 0 : 1;
  }
  return wrong;
}

}  // namespace

void fill_input(const CollectiveCase& the_case, int rank, void* input, size_t count) {
  with_type(the_case, [&]<class T>(const Values<T>& values) {
    for (size_t i = 0; i < count; ++i) static_cast<T*>(input)[i] = values.input(rank, i);
  });
}

void fill_factor(const CollectiveCase& the_case, int rank, void* factor) {
  with_type(the_case, [&]<class T>(const Values<T>& values) {
    *static_cast<T*>(factor) = values.multiplier(rank);
  });
}

uint64_t count_changed(const CollectiveCase& the_case, int rank, const void* input, size_t count) {
  return with_type(the_case, [&]<class T>(const Values<T>& values) {
    return differing<T>(input, count, [&](size_t i) { return values.input(rank, i); });
  });
}

uint64_t count_wrong(const CollectiveCase& the_case, int rank, const void* output, size_t count) {
  const bool at_root =
      the_case.collective == Measured::kReduce || the_case.collective == Measured::kGather;
  if (at_root && rank != the_case.root) return 0;
  const size_t elements =
      wide_output(the_case.collective) ? count * static_cast<size_t>(the_case.ranks) : count;
  return with_type(the_case, [&]<class T>(const Values<T>& values) {
    return differing<T>(output, elements, [&](size_t i) { return values.output(rank, i, count); });
  });
}

}  // namespace baton::bench
