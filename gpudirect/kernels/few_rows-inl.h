// How products of few rows read a weight: once, 32 columns to a block, ahead of what is multiplied.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kFewK = 256;  // of a step
inline constexpr uint32_t kFewThreads = 128;
// The padding puts neighbouring columns on different banks.
template <uint32_t kRows>
struct FewStep {
  Vector16 w[kFewColumns][kFewK / 8 + 1];
  Vector16 a[kRows][kFewK / 4 + 1];
};

template <uint32_t kRows, class Block>
BATON_DEVICE void bring_few(Block& block, const Gemm& a, uint32_t column, uint32_t k0,
                            FewStep<kRows>& to, uint32_t thread) {
  constexpr uint32_t kPieces = kFewK / 8, kDown = kFewThreads / kPieces;  // rows at a time
  constexpr uint32_t kPiecesA = kFewK / 4;
  const uint32_t row = column + thread / kPieces, piece = thread % kPieces;
  const uint16_t* from = a.w + uint64_t{row} * a.k + k0 + piece * 8;
  const uint32_t there = k0 + piece * 8 < a.k && row < a.n ? a.n - row : 0;
  BATON_UNROLL
  for (uint32_t i = 0; i < kFewColumns; i += kDown) {
    block.copy_16(&to.w[i + thread / kPieces][piece], from, i < there ? 16 : 0);
    from += uint64_t{kDown} * a.k;
  }
  each_share<kRows * kPiecesA, kFewThreads>(thread, [&](uint32_t i) {
    const uint32_t own = i / kPiecesA, k = k0 + i % kPiecesA * 4;
    if (own >= a.m) return;  // no thread reads it, or what it becomes
    block.copy_16(&to.a[own][i % kPiecesA], a.a + uint64_t{own} * a.lda + k, k < a.k ? 16 : 0);
  });
}

// add(step, k) for each step of columns [column, ...), of which there are k.
template <uint32_t kRows, class Block, class Add>
BATON_DEVICE void few_steps(Block& block, const Gemm& a, uint32_t column, const Add& add) {
  constexpr uint32_t kStages = kFewBytes / sizeof(FewStep<kRows>);
  auto* const stages = reinterpret_cast<FewStep<kRows>*>(block.large_shared());
  const uint32_t steps = pieces_of(a.k, kFewK);
  const auto bring = [&](uint32_t thread, uint32_t step) {
    if (step < steps) {
      bring_few(block, a, column, step * kFewK, stages[step % kStages], thread);
    }
    block.end_copies();
  };
  block.each_free([&](uint32_t thread) {
    for (uint32_t step = 0; step < kStages - 1; ++step) bring(thread, step);
  });
  for (uint32_t step = 0; step < steps; ++step) {
    block.each([&](uint32_t) { block.template wait_copies<kStages - 2>(); });
    block.each_free([&](uint32_t thread) { bring(thread, step + kStages - 1); });
    add(stages[step % kStages], smaller(kFewK, a.k - step * kFewK));
  }
  block.each([](uint32_t) {});  // all have read their last step before others are brought
}

}  // namespace baton::gpudirect::kernels
