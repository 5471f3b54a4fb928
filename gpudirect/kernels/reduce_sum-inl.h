// Several vectors combined into one, element by element, in the order of the vectors.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

template <class T>
struct alignas(16) Items {
  T item[16 / sizeof(T)];
};

// How elements lie in memory (Word), and in what they are combined (Value).
template <class T>
struct PlainLanes {
  using Word = T;
  using Value = T;
  static BATON_DEVICE Value widen(Word word) { return word; }
  static BATON_DEVICE Word narrow(Value value) { return value; }
};

template <float (*kWiden)(uint32_t), uint32_t (*kNarrow)(float)>
struct HalfLanes {
  using Word = uint16_t;
  using Value = float;
  static BATON_DEVICE Value widen(Word word) { return kWiden(word); }
  static BATON_DEVICE Word narrow(Value value) { return static_cast<Word>(kNarrow(value)); }
};

BATON_DEVICE float joined(float a, float b, bool either) {
  const uint32_t x = bits_of(a), y = bits_of(b);
  return float_of(either ? x | y : x & y);
}
BATON_DEVICE double joined(double a, double b, bool either) {
  const auto x = __builtin_bit_cast(uint64_t, a), y = __builtin_bit_cast(uint64_t, b);
  return __builtin_bit_cast(double, either ? x | y : x& y);
}

// Of floats: NaN if either is, and -0 is below +0.
template <class Lanes>
struct FloatArithmetic : Lanes {
  using Value = typename Lanes::Value;
  static constexpr bool kVectors = true;
  static BATON_DEVICE Value add(Value a, Value b) { return a + b; }
  static BATON_DEVICE Value multiply(Value a, Value b) { return a * b; }
  static BATON_DEVICE Value least(Value a, Value b) {
    if (a == b) return joined(a, b, true);
    return a < b || a != a ? a : b;
  }
  static BATON_DEVICE Value most(Value a, Value b) {
    if (a == b) return joined(a, b, false);
    return a > b || a != a ? a : b;
  }
  static BATON_DEVICE Value divide(Value a, uint32_t by) { return a / static_cast<Value>(by); }
};

// Wraps as its unsigned type does.
template <class T, class Unsigned>
struct WholeArithmetic : PlainLanes<T> {
  using Value = T;
  static constexpr bool kVectors = false;  // rare: an image of a third less is worth more
  static BATON_DEVICE T add(T a, T b) {
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  }
  static BATON_DEVICE T multiply(T a, T b) {
    return static_cast<T>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
  }
  static BATON_DEVICE T least(T a, T b) { return smaller(a, b); }
  static BATON_DEVICE T most(T a, T b) { return larger(a, b); }
  static BATON_DEVICE T divide(T a, uint32_t by) {
    return static_cast<T>(static_cast<int64_t>(a) / static_cast<int64_t>(by));
  }
};

template <class Lanes>
BATON_DEVICE typename Lanes::Value combine(SumOperation operation, typename Lanes::Value a,
                                           typename Lanes::Value b) {
  switch (operation) {
    case SumOperation::kSum:
      return Lanes::add(a, b);
    case SumOperation::kProd:
      return Lanes::multiply(a, b);
    case SumOperation::kMin:
      return Lanes::least(a, b);
    case SumOperation::kMax:
      return Lanes::most(a, b);
  }
  return a;
}

template <class Lanes, class Block>
BATON_DEVICE void sum_vector(Block& block, const ReduceSum& a, uint64_t at) {
  using Word = typename Lanes::Word;
  constexpr uint32_t kCount = 16 / sizeof(Word);
  typename Lanes::Value sums[kCount];
  auto next =
      __builtin_bit_cast(Items<Word>, block.load(static_cast<const Vector16*>(a.sources[0]) + at));
  BATON_UNROLL for (uint32_t i = 0; i < kCount; ++i) sums[i] = Lanes::widen(next.item[i]);
  for (uint32_t s = 1; s < a.source_count; ++s) {
    next = __builtin_bit_cast(Items<Word>,
                              block.load(static_cast<const Vector16*>(a.sources[s]) + at));
    BATON_UNROLL for (uint32_t i = 0; i < kCount; ++i) {
      sums[i] = combine<Lanes>(a.operation, sums[i], Lanes::widen(next.item[i]));
    }
  }
  BATON_UNROLL for (uint32_t i = 0; i < kCount; ++i) {
    next.item[i] = Lanes::narrow(a.divide_by > 1 ? Lanes::divide(sums[i], a.divide_by) : sums[i]);
  }
  block.store(static_cast<Vector16*>(a.target) + at, __builtin_bit_cast(Vector16, next));
}

template <class Lanes, class Block>
BATON_DEVICE void sum_element(Block& block, const ReduceSum& a, uint64_t at) {
  using Word = typename Lanes::Word;
  auto sum = Lanes::widen(block.load(static_cast<const Word*>(a.sources[0]) + at));
  for (uint32_t s = 1; s < a.source_count; ++s) {
    sum = combine<Lanes>(a.operation, sum,
                         Lanes::widen(block.load(static_cast<const Word*>(a.sources[s]) + at)));
  }
  block.store(static_cast<Word*>(a.target) + at,
              Lanes::narrow(a.divide_by > 1 ? Lanes::divide(sum, a.divide_by) : sum));
}

template <class Lanes, class Block>
BATON_DEVICE void sum_all(Block& block, const ReduceSum& a) {
  uintptr_t places = reinterpret_cast<uintptr_t>(a.target);
  for (uint32_t s = 0; s < a.source_count; ++s) {
    places |= reinterpret_cast<uintptr_t>(a.sources[s]);
  }
  constexpr uint64_t kCount = 16 / sizeof(typename Lanes::Word);
  const uint64_t vectors = Lanes::kVectors && places % 16 == 0 ? a.count / kCount : 0;
  block.each([&](uint32_t thread) {
    const uint64_t first = uint64_t{block.index()} * block.threads() + thread;
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    if constexpr (Lanes::kVectors) {
      for (uint64_t i = first; i < vectors; i += step) sum_vector<Lanes>(block, a, i);
    }
    for (uint64_t i = vectors * kCount + first; i < a.count; i += step) {
      sum_element<Lanes>(block, a, i);
    }
  });
}

template <class Block>
BATON_DEVICE void reduce_sum(Block& block, const ReduceSum& a) {
  switch (a.element) {
    case SumElement::kF32:
      return sum_all<FloatArithmetic<PlainLanes<float>>>(block, a);
    case SumElement::kF16:
      return sum_all<FloatArithmetic<HalfLanes<from_f16, to_f16>>>(block, a);
    case SumElement::kBF16:
      return sum_all<FloatArithmetic<HalfLanes<from_bf16, to_bf16>>>(block, a);
    case SumElement::kF64:
      return sum_all<FloatArithmetic<PlainLanes<double>>>(block, a);
    case SumElement::kI8:
      return sum_all<WholeArithmetic<int8_t, uint8_t>>(block, a);
    case SumElement::kU8:
      return sum_all<WholeArithmetic<uint8_t, uint8_t>>(block, a);
    case SumElement::kI32:
      return sum_all<WholeArithmetic<int32_t, uint32_t>>(block, a);
    case SumElement::kI64:
      return sum_all<WholeArithmetic<int64_t, uint64_t>>(block, a);
  }
}

}  // namespace baton::gpudirect::kernels
