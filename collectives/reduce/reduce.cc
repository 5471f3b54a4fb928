// Reductions: one loop (reduce-inl.h) for every type, operation and instruction set.
#include "collectives/reduce/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "collectives/reduce/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "collectives/reduce/reduce.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "collectives/reduce/reduce-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::collectives::reduce {
namespace HWY_NAMESPACE {

using Loop = void (*)(void*, const void* const*, size_t, size_t, uint32_t);

// Null where elements do not combine so (combines() in types.h).
// Sums and products wrap: they are the same for signed and unsigned, and defined for the latter.
template <class Wrapping, class Ordered, size_t kSources>
Loop loop_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPreMulSum:
      return fold_loop<Wrapping, Sum, kSources>;
    case ReduceOp::kProd:
      return fold_loop<Wrapping, Prod, kSources>;
    case ReduceOp::kMin:
      return fold_loop<Ordered, Min, kSources>;
    case ReduceOp::kMax:
      return fold_loop<Ordered, Max, kSources>;
    default:
      break;
  }
  if constexpr (!Wrapping::kFloat) {
    if (op == ReduceOp::kAnd) return fold_loop<Wrapping, And, kSources>;
    if (op == ReduceOp::kOr) return fold_loop<Wrapping, Or, kSources>;
    if (op == ReduceOp::kXor) return fold_loop<Wrapping, Xor, kSources>;
  }
  return nullptr;
}

// A sum is true if any is, a product if all are.
template <size_t kSources>
Loop loop_of_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return fold_loop<BoolLanes, Or, kSources>;
    case ReduceOp::kProd:
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return fold_loop<BoolLanes, And, kSources>;
    case ReduceOp::kXor:
      return fold_loop<BoolLanes, Xor, kSources>;
    default:
      return nullptr;
  }
}

template <size_t kSources>
Loop loop_of(DataType type, ReduceOp op) {
  using U8 = PlainLanes<uint8_t>;
  using U32 = PlainLanes<uint32_t>;
  using U64 = PlainLanes<uint64_t>;
  switch (type) {
    case DataType::kF32:
      return loop_of<PlainLanes<float>, PlainLanes<float>, kSources>(op);
    case DataType::kF16:
      return loop_of<F16Lanes, F16Lanes, kSources>(op);
    case DataType::kBF16:
      return loop_of<BF16Lanes, BF16Lanes, kSources>(op);
    case DataType::kF64:
      return loop_of<PlainLanes<double>, PlainLanes<double>, kSources>(op);
    case DataType::kI8:
      return loop_of<U8, PlainLanes<int8_t>, kSources>(op);
    case DataType::kU8:
      return loop_of<U8, U8, kSources>(op);
    case DataType::kI32:
      return loop_of<U32, PlainLanes<int32_t>, kSources>(op);
    case DataType::kI64:
      return loop_of<U64, PlainLanes<int64_t>, kSources>(op);
    case DataType::kF8E4M3:
      return loop_of<E4M3Lanes, E4M3Lanes, kSources>(op);
    case DataType::kF8E5M2:
      return loop_of<E5M2Lanes, E5M2Lanes, kSources>(op);
    case DataType::kU32:
      return loop_of<U32, U32, kSources>(op);
    case DataType::kU64:
      return loop_of<U64, U64, kSources>(op);
    case DataType::kBool:
      return loop_of_bool<kSources>(op);
  }
  return nullptr;
}

void fold_any(DataType type, ReduceOp op, void* target, const void* const* sources,
              size_t source_count, size_t count, uint32_t divide_by) {
  const Loop loop = source_count == 2 ? loop_of<2>(type, op) : loop_of<0>(type, op);
  loop(target, sources, source_count, count, divide_by);
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::collectives::reduce
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::collectives::reduce {
namespace {

HWY_EXPORT(fold_any);

template <class T>
void divide_integers(void* target, size_t count, uint32_t by) {
  T* const out = static_cast<T*>(target);
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<T>(out[i] / Wide{by});
}

// No instruction set divides integers.
void divide_if_integer(DataType type, void* target, size_t count, uint32_t by) {
  switch (type) {
    case DataType::kI8:
      return divide_integers<int8_t>(target, count, by);
    case DataType::kU8:
      return divide_integers<uint8_t>(target, count, by);
    case DataType::kI32:
      return divide_integers<int32_t>(target, count, by);
    case DataType::kI64:
      return divide_integers<int64_t>(target, count, by);
    case DataType::kU32:
      return divide_integers<uint32_t>(target, count, by);
    case DataType::kU64:
      return divide_integers<uint64_t>(target, count, by);
    default:
      return;
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
  if (count == 0) return;
  HWY_DYNAMIC_DISPATCH(fold_any)
  (type, op, target, sources.data(), sources.size(), count, divide_by);
  if (divide_by > 1) divide_if_integer(type, target, count, divide_by);
}

void multiply(DataType type, void* target, const void* source, const void* factor, size_t count) {
  const size_t element = size_of(type);
  std::array<std::byte, 4096> factors;
  const size_t most = factors.size() / element;
  for (size_t i = 0; i < std::min(most, count); ++i) {
    std::memcpy(factors.data() + i * element, factor, element);
  }
  for (size_t i = 0; i < count; i += most) {
    reduce(type, ReduceOp::kProd, static_cast<std::byte*>(target) + i * element,
           static_cast<const std::byte*>(source) + i * element, factors.data(),
           std::min(most, count - i));
  }
}

}  // namespace baton::collectives::reduce
#endif  // HWY_ONCE
