// Products of fp32 matrices in any of the forms that training has, many at a time; the engine's to
// the bit. The tiles and their sums are those of gemm_exact-inl.h.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/gemm_exact-inl.h"

namespace baton::gpudirect::kernels {

template <uint32_t kRows, uint32_t kColumns, class Block>
BATON_DEVICE void f32_tiles(Block& block, const GemmF32& a) {
  const uint32_t down = pieces_of(a.m, kRows), across = pieces_of(a.n, kColumns);
  const uint64_t each = uint64_t{down} * across, tiles = each * a.outer * a.inner;
  for (uint64_t item = block.index(); item < tiles; item += block.blocks()) {
    const auto tile = static_cast<uint32_t>(item % each);
    const uint64_t outer = item / each / a.inner, inner = item / each % a.inner;
    ExactTile at = {tile % down * kRows, tile / down * kColumns, 0, a.k};
    if (a.causal == Causal::kBelow && at.column >= at.row + kCausalRows) continue;
    if (a.causal == Causal::kUntil) at.k_end = smaller(a.k, at.row + kCausalRows);
    if (a.causal == Causal::kFrom) at.k_begin = at.row;
    const WordRows left = {
        reinterpret_cast<const uint32_t*>(a.a + outer * a.a_outer + inner * a.a_inner), a.m,
        a.a_row, a.a_k};
    const WordRows right = {
        reinterpret_cast<const uint32_t*>(a.b + outer * a.b_outer + inner * a.b_inner), a.n,
        a.b_column, a.b_k};
    const uint64_t c = outer * a.c_outer + inner * a.c_inner;
    exact_tile<kRows, kColumns, false>(
        block, left, right, at,
        [&](uint32_t row, uint32_t column) {
          return a.start != nullptr ? block.load(a.start + c + uint64_t{row} * a.ldc + column)
                                    : 0.0f;
        },
        [&](uint32_t row, uint32_t column, float sum) {
          block.store(a.c + c + uint64_t{row} * a.ldc + column, sum);
        });
  }
}

template <class Block>
BATON_DEVICE void gemm_f32(Block& block, const GemmF32& a) {
  switch (f32_tile(a)) {
    case F32Tile::kLarge:
      return f32_tiles<128, 128>(block, a);
    case F32Tile::kMiddle:
      return f32_tiles<64, 64>(block, a);
    case F32Tile::kSmall:
      return f32_tiles<64, 32>(block, a);
  }
}

}  // namespace baton::gpudirect::kernels
