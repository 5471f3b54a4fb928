// Products of fp32 matrices in any of the forms that training has, many at a time; the engine's to
// the bit. The tiles and their sums are those of gemm-inl.h.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/gemm-inl.h"

namespace baton::gpudirect::kernels {

static_assert(kTileRows == kCausalRows && kTileColumns == 64);

// A tile of one of the products: where the matrices begin, and which k it sums over.
struct F32Tile {
  const float* a;
  const float* b;
  uint64_t c;  // of c and of start
  uint32_t row;
  uint32_t column;
  uint32_t k_begin;
  uint32_t k_end;
};

BATON_DEVICE F32Tile f32_tile(const GemmF32& a, uint64_t item) {
  const uint32_t down = pieces_of(a.m, kTileRows), across = pieces_of(a.n, kTileColumns);
  const auto tile = static_cast<uint32_t>(item % (uint64_t{down} * across));
  const uint64_t matrix = item / (uint64_t{down} * across);
  const uint64_t outer = matrix / a.inner, inner = matrix % a.inner;
  F32Tile at = {a.a + outer * a.a_outer + inner * a.a_inner,
                a.b + outer * a.b_outer + inner * a.b_inner,
                outer * a.c_outer + inner * a.c_inner,
                tile % down * kTileRows,
                tile / down * kTileColumns,
                0,
                a.k};
  if (a.causal == Causal::kUntil) at.k_end = smaller(a.k, at.row + kTileRows);
  if (a.causal == Causal::kFrom) at.k_begin = at.row;
  return at;
}

// What is neighbouring in memory is brought by neighbouring threads.
template <class Block>
BATON_DEVICE void load_f32(Block& block, const GemmF32& a, const F32Tile& at, uint32_t k0,
                           ExactStep<kTileRows>& step, uint32_t thread) {
  for (uint32_t i = thread; i < kTileRows * kStepK; i += block.threads()) {
    const uint32_t row = a.a_k == 1 ? i / kStepK : i % kTileRows;
    const uint32_t k = a.a_k == 1 ? i % kStepK : i / kTileRows;
    const bool inside = at.row + row < a.m && k0 + k < at.k_end;
    step.a[k][row] =
        inside ? block.load(at.a + uint64_t{at.row + row} * a.a_row + uint64_t{k0 + k} * a.a_k)
               : 0.0f;
  }
  for (uint32_t i = thread; i < kTileColumns * kStepK; i += block.threads()) {
    const uint32_t column = a.b_k == 1 ? i / kStepK : i % kTileColumns;
    const uint32_t k = a.b_k == 1 ? i % kStepK : i / kTileColumns;
    const bool inside = at.column + column < a.n && k0 + k < at.k_end;
    step.w[k][column] = inside ? block.load(at.b + uint64_t{k0 + k} * a.b_k +
                                            uint64_t{at.column + column} * a.b_column)
                               : 0.0f;
  }
}

template <class Block>
BATON_DEVICE void gemm_f32(Block& block, const GemmF32& a) {
  auto& step = *block.template shared<ExactStep<kTileRows>, 1>();
  const uint64_t tiles =
      uint64_t{pieces_of(a.m, kTileRows)} * pieces_of(a.n, kTileColumns) * a.outer * a.inner;
  for (uint64_t item = block.index(); item < tiles; item += block.blocks()) {
    const F32Tile at = f32_tile(a, item);
    if (a.causal == Causal::kBelow && at.column >= at.row + kTileRows) continue;
    auto all_sums = block.template per_thread<ExactSums<kTileRows>>();
    const auto each_sum = [&](uint32_t thread, const auto& function) {
      const uint32_t row = at.row + thread / 16 * (kTileRows / 8);
      const uint32_t column = at.column + thread % 16 * 4;
      for (uint32_t r = 0; r < kTileRows / 8; ++r) {
        for (uint32_t c = 0; c < 4; ++c) {
          const bool inside = row + r < a.m && column + c < a.n;
          function(inside, at.c + uint64_t{row + r} * a.ldc + column + c,
                   all_sums[thread].of[r][c]);
        }
      }
    };
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint64_t place, float& sum) {
        sum = inside && a.start != nullptr ? block.load(a.start + place) : 0.0f;
      });
    });
    for (uint32_t k0 = at.k_begin; k0 < at.k_end; k0 += kStepK) {
      block.each([&](uint32_t thread) { load_f32(block, a, at, k0, step, thread); });
      block.each([&](uint32_t thread) {
        if (k0 + kStepK <= at.k_end) {
          BATON_UNROLL_BY_4
          for (uint32_t k = 0; k < kStepK; ++k) {
            add_step<kTileRows>(step, k, thread, all_sums[thread]);
          }
        } else {
          for (uint32_t k = 0; k < at.k_end - k0; ++k) {
            add_step<kTileRows>(step, k, thread, all_sums[thread]);
          }
        }
      });
    }
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint64_t place, float& sum) {
        if (inside) block.store(a.c + place, sum);
      });
    });
  }
}

}  // namespace baton::gpudirect::kernels
