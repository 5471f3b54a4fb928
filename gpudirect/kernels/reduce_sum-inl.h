// Several vectors combined into one, element by element, in the order of the vectors.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

template <class T>
struct alignas(16) Items {
  T item[16 / sizeof(T)];
};

// How elements lie in memory (Word), in what they are combined (Value), and how many vectors of 16
// bytes a thread adds at once: registers allow four of those that are converted easily.
template <class T>
struct PlainLanes {
  static constexpr uint32_t kAtOnce = sizeof(T) == 4 ? 4 : 2;
  using Word = T;
  using Value = T;
  static BATON_DEVICE Value widen(Word word) { return word; }
  static BATON_DEVICE Word narrow(Value value) { return value; }
};

template <float (*kWiden)(uint32_t), uint32_t (*kNarrow)(float), uint32_t kVectors>
struct HalfLanes {
  static constexpr uint32_t kAtOnce = kVectors;
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

// Float rules: NaN if either is, and -0 is below +0.
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

// So many vectors of 16 bytes, `step` apart. The next source's are read before one's are combined.
template <class Lanes, uint32_t kVectors, bool kPlain, class Block>
BATON_DEVICE void sum_vectors(Block& block, const ReduceSum& a, uint64_t at, uint64_t step) {
  using Word = typename Lanes::Word;
  constexpr uint32_t kCount = 16 / sizeof(Word);
  typename Lanes::Value sums[kVectors][kCount];
  Vector16 now[kVectors], next[kVectors];
  const auto read = [&](uint32_t source, Vector16* to) {
    const auto* const from = static_cast<const Vector16*>(a.sources[source]) + at;
    BATON_UNROLL for (uint32_t j = 0; j < kVectors; ++j) to[j] = block.load(from + j * step);
  };
  const auto each_element = [&](const auto& function) {
    BATON_UNROLL for (uint32_t j = 0; j < kVectors; ++j) {
      const auto items = __builtin_bit_cast(Items<Word>, now[j]);
      BATON_UNROLL for (uint32_t i = 0; i < kCount; ++i) {
        function(sums[j][i], Lanes::widen(items.item[i]));
      }
    }
  };
  read(0, now);
  if (a.source_count > 1) read(1, next);
  each_element([](auto& sum, auto value) { sum = value; });
  for (uint32_t s = 1; s < a.source_count; ++s) {
    BATON_UNROLL for (uint32_t j = 0; j < kVectors; ++j) now[j] = next[j];
    if (s + 1 < a.source_count) read(s + 1, next);
    each_element([&](auto& sum, auto value) {
      sum = kPlain ? Lanes::add(sum, value) : combine<Lanes>(a.operation, sum, value);
    });
  }
  BATON_UNROLL for (uint32_t j = 0; j < kVectors; ++j) {
    Items<Word> out;
    BATON_UNROLL for (uint32_t i = 0; i < kCount; ++i) {
      out.item[i] =
          Lanes::narrow(a.divide_by > 1 ? Lanes::divide(sums[j][i], a.divide_by) : sums[j][i]);
    }
    block.store(static_cast<Vector16*>(a.target) + at + j * step,
                __builtin_bit_cast(Vector16, out));
  }
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
      uint64_t i = first;
      if (a.operation == SumOperation::kSum) {
        constexpr uint32_t kVectors = Lanes::kAtOnce;
        for (; i + (kVectors - 1) * step < vectors; i += kVectors * step) {
          sum_vectors<Lanes, kVectors, true>(block, a, i, step);
        }
      }
      for (; i < vectors; i += step) sum_vectors<Lanes, 1, false>(block, a, i, step);
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
      return sum_all<FloatArithmetic<HalfLanes<from_f16, to_f16, 2>>>(block, a);
    case SumElement::kBF16:
      return sum_all<FloatArithmetic<HalfLanes<from_bf16, to_bf16, 4>>>(block, a);
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
