// The plain versions of the reductions: one element at a time, small floats by arithmetic.
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "tests/reduce/reference.h"

namespace baton::collectives::reduce::reference {
namespace {

struct Bool {
  uint8_t byte = 0;
  bool widen() const { return byte != 0; }
  static Bool round(bool value) { return {static_cast<uint8_t>(value ? 1 : 0)}; }
};

template <class T>
auto wide(T value) {
  if constexpr (std::is_arithmetic_v<T>) {
    return value;
  } else {
    return value.widen();
  }
}

template <class T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    const bool extreme = op == ReduceOp::kMin || op == ReduceOp::kMax;
    if (extreme && std::isnan(a)) return a;
    if (extreme && std::isnan(b)) return b;
    const auto below = [](T x, T y) { return x < y || (x == y && std::signbit(x)); };
    if (op == ReduceOp::kMin) return below(a, b) ? a : b;
    if (op == ReduceOp::kMax) return below(a, b) ? b : a;
    return op == ReduceOp::kProd ? a * b : a + b;
  } else {
    if (op == ReduceOp::kAnd) return static_cast<T>(a & b);
    if (op == ReduceOp::kOr) return static_cast<T>(a | b);
    if (op == ReduceOp::kXor) return static_cast<T>(a ^ b);
    if (op == ReduceOp::kMin) return a < b ? a : b;
    if (op == ReduceOp::kMax) return a < b ? b : a;
    if constexpr (std::is_same_v<T, bool>) {
      return op == ReduceOp::kProd ? a && b : a || b;
    } else {
      using Bits = std::make_unsigned_t<T>;  // which wrap around, and widen without a sign
      const uint64_t x = static_cast<Bits>(a), y = static_cast<Bits>(b);
      return static_cast<T>(op == ReduceOp::kProd ? x * y : x + y);
    }
  }
}

template <class T>
T quotient(T value, uint32_t by) {
  if (by <= 1 || std::is_same_v<T, bool>) return value;
  if constexpr (std::is_floating_point_v<T>) {
    return value / static_cast<T>(by);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>(static_cast<Wide>(value) / Wide{by});
  }
}

template <class T>
void fold_typed(ReduceOp op, void* target, absl::Span<const void* const> sources, size_t count,
                uint32_t divide_by) {
  for (size_t i = 0; i < count; ++i) {
    const auto at = [i](const void* source) {
      T element{};
      std::memcpy(&element, static_cast<const T*>(source) + i, sizeof element);
      return wide(element);
    };
    auto value = at(sources[0]);
    for (const void* source : sources.subspan(1)) value = combine(op, value, at(source));
    value = quotient(value, divide_by);
    if constexpr (std::is_arithmetic_v<T>) {
      static_cast<T*>(target)[i] = value;
    } else {
      static_cast<T*>(target)[i] = T::round(value);
    }
  }
}

}  // namespace

void reduce(DataType type, ReduceOp op, void* target, const void* a, const void* b, size_t count,
            uint32_t divide_by) {
  const std::array<const void*, 2> sources = {a, b};
  fold(type, op, target, sources, count, divide_by);
}

void fold(DataType type, ReduceOp op, void* target, absl::Span<const void* const> sources,
          size_t count, uint32_t divide_by) {
  switch (type) {
    case DataType::kF32:
      return fold_typed<float>(op, target, sources, count, divide_by);
    case DataType::kF16:
      return fold_typed<F16>(op, target, sources, count, divide_by);
    case DataType::kBF16:
      return fold_typed<BF16>(op, target, sources, count, divide_by);
    case DataType::kF64:
      return fold_typed<double>(op, target, sources, count, divide_by);
    case DataType::kI8:
      return fold_typed<int8_t>(op, target, sources, count, divide_by);
    case DataType::kU8:
      return fold_typed<uint8_t>(op, target, sources, count, divide_by);
    case DataType::kI32:
      return fold_typed<int32_t>(op, target, sources, count, divide_by);
    case DataType::kI64:
      return fold_typed<int64_t>(op, target, sources, count, divide_by);
    case DataType::kF8E4M3:
      return fold_typed<E4M3>(op, target, sources, count, divide_by);
    case DataType::kF8E5M2:
      return fold_typed<E5M2>(op, target, sources, count, divide_by);
    case DataType::kU32:
      return fold_typed<uint32_t>(op, target, sources, count, divide_by);
    case DataType::kU64:
      return fold_typed<uint64_t>(op, target, sources, count, divide_by);
    case DataType::kBool:
      return fold_typed<Bool>(op, target, sources, count, divide_by);
  }
}

}  // namespace baton::collectives::reduce::reference
