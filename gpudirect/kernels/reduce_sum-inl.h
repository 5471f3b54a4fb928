// Sums of several vectors, element by element, in the order of the vectors.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

struct LanesF32 {
  using Word = uint32_t;
  static constexpr uint32_t kCount = 4;  // in 16 bytes
  static BATON_DEVICE float get(const Vector16& v, uint32_t i) { return float_of(v.word[i]); }
  static BATON_DEVICE void set(Vector16& v, uint32_t i, float value) { v.word[i] = bits_of(value); }
  static BATON_DEVICE float widen(Word word) { return float_of(word); }
  static BATON_DEVICE Word narrow(float value) { return bits_of(value); }
};

// 16-bit elements, two in a word.
template <float (*kWiden)(uint32_t), uint32_t (*kNarrow)(float)>
struct LanesHalf {
  using Word = uint16_t;
  static constexpr uint32_t kCount = 8;
  static BATON_DEVICE float get(const Vector16& v, uint32_t i) {
    return kWiden(v.word[i / 2] >> i % 2 * 16 & 0xffffu);
  }
  static BATON_DEVICE void set(Vector16& v, uint32_t i, float value) {
    const uint32_t shift = i % 2 * 16;
    v.word[i / 2] = (v.word[i / 2] & ~(0xffffu << shift)) | kNarrow(value) << shift;
  }
  static BATON_DEVICE float widen(Word word) { return kWiden(word); }
  static BATON_DEVICE Word narrow(float value) { return static_cast<Word>(kNarrow(value)); }
};

template <class Lanes, class Block>
BATON_DEVICE void sum_vector(Block& block, const ReduceSum& a, uint64_t at, float divisor) {
  float sums[Lanes::kCount];
  Vector16 next = block.load(static_cast<const Vector16*>(a.sources[0]) + at);
  for (uint32_t i = 0; i < Lanes::kCount; ++i) sums[i] = Lanes::get(next, i);
  for (uint32_t s = 1; s < a.source_count; ++s) {
    next = block.load(static_cast<const Vector16*>(a.sources[s]) + at);
    for (uint32_t i = 0; i < Lanes::kCount; ++i) sums[i] = sums[i] + Lanes::get(next, i);
  }
  for (uint32_t i = 0; i < Lanes::kCount; ++i) {
    Lanes::set(next, i, a.divide_by > 1 ? sums[i] / divisor : sums[i]);
  }
  block.store(static_cast<Vector16*>(a.target) + at, next);
}

template <class Lanes, class Block>
BATON_DEVICE void sum_element(Block& block, const ReduceSum& a, uint64_t at, float divisor) {
  using Word = typename Lanes::Word;
  float sum = Lanes::widen(block.load(static_cast<const Word*>(a.sources[0]) + at));
  for (uint32_t s = 1; s < a.source_count; ++s) {
    sum = sum + Lanes::widen(block.load(static_cast<const Word*>(a.sources[s]) + at));
  }
  block.store(static_cast<Word*>(a.target) + at,
              Lanes::narrow(a.divide_by > 1 ? sum / divisor : sum));
}

template <class Lanes, class Block>
BATON_DEVICE void sum_all(Block& block, const ReduceSum& a) {
  block.each([&](uint32_t thread) {
    const uint64_t first = uint64_t{block.index()} * block.threads() + thread;
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    const auto divisor = static_cast<float>(a.divide_by);
    const uint64_t vectors = a.count / Lanes::kCount;
    for (uint64_t i = first; i < vectors; i += step) sum_vector<Lanes>(block, a, i, divisor);
    for (uint64_t i = vectors * Lanes::kCount + first; i < a.count; i += step) {
      sum_element<Lanes>(block, a, i, divisor);
    }
  });
}

template <class Block>
BATON_DEVICE void reduce_sum(Block& block, const ReduceSum& a) {
  switch (a.element) {
    case Element::kF32:
      return sum_all<LanesF32>(block, a);
    case Element::kBF16:
      return sum_all<LanesHalf<from_bf16, to_bf16>>(block, a);
    case Element::kF16:
      return sum_all<LanesHalf<from_f16, to_f16>>(block, a);
  }
}

}  // namespace baton::gpudirect::kernels
