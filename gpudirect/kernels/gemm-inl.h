// Matrix products with a weight in bf16, by tensor cores: of many rows in tiles, of few rows by
// warps that read the weight once.
//
// Sums are never split, and both add in the same order: what a row becomes depends on nothing but
// the row.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/few_rows-inl.h"
#include "gpudirect/kernels/fragments.h"

namespace baton::gpudirect::kernels {

// What c starts from, and what is added last.
template <class Block>
BATON_DEVICE float first_sum(Block& block, const Gemm& a, uint32_t row, uint32_t column) {
  const bool starts = a.accumulate != 0 && row < a.m && column < a.n;
  return starts ? block.load(a.c + uint64_t{row} * a.ldc + column) : 0.0f;
}
template <class Block>
BATON_DEVICE void store_sum(Block& block, const Gemm& a, uint32_t row, uint32_t column, float sum) {
  if (row >= a.m || column >= a.n) return;
  if (a.bias != nullptr) sum = sum + block.load(a.bias + column);
  block.store(a.c + uint64_t{row} * a.ldc + column, sum);
}
// function(row, column, e) for the four sums that a thread has of a fragment.
template <class Function>
BATON_DEVICE void each_sum(uint32_t lane, uint32_t row, uint32_t column, const Function& function) {
  BATON_UNROLL
  for (uint32_t e = 0; e < 4; ++e) {
    function(row + lane / 4 + e / 2 * 8, column + lane % 4 * 2 + e % 2, e);
  }
}

// ---- few rows ----

struct FewLeft {
  FragmentA of[1];
};
struct FewRight {
  FragmentB of[1];
};
struct FewSums {
  FragmentC of[1];
};

// A warp has 8 of the block's columns, and all rows.
template <uint32_t kRows, class Block>
BATON_DEVICE void few_by_tensor_cores(Block& block, const Gemm& a) {
  for (uint32_t item = block.index(); item * kFewColumns < a.n; item += block.blocks()) {
    auto left = block.template per_thread<FewLeft>();
    auto right = block.template per_thread<FewRight>();
    auto sums = block.template per_thread<FewSums>();
    const auto each_of_warp = [&](uint32_t thread, const auto& function) {
      each_sum(thread % 32, 0, item * kFewColumns + thread / 32 * 8,
               [&](uint32_t row, uint32_t column, uint32_t e) {
                 function(row, column, sums[thread].of[0].value[e]);
               });
    };
    block.each_free([&](uint32_t thread) {
      each_of_warp(thread, [&](uint32_t row, uint32_t column, float& sum) {
        sum = first_sum(block, a, row, column);
      });
    });
    few_steps<kRows>(block, a, item * kFewColumns, [&](const FewStep<kRows>& from, uint32_t k) {
      const auto add = [&](uint32_t step) {
        block.load_fragments(right, 0, [&](uint32_t thread) {
          return &from.w[thread / 32 * 8 + thread % 8][step * 4 + thread % 32 / 8];
        });
        block.each_free([&](uint32_t thread) {
          const uint32_t row = thread % 32 / 4, t = thread % 4;
          BATON_UNROLL
          for (uint32_t e = 0; e < 8; ++e) {
            // As fragments.h has it: e is the half, the upper k of it, and the lower rows.
            const uint32_t own = row + e % 2 * 8, pair = step * 16 + e / 2 * 4 + t;
            const bool there = own < kRows;
            const Vector8 two = reinterpret_cast<const Vector8*>(from.a[there ? own : 0])[pair];
            left[thread].of[0].word[e] =
                there ? round_pair(float_of(two.word[0]), float_of(two.word[1])) : 0;
          }
        });
        block.multiply_fragments(left, right, sums);
      };
      if (k == kFewK) {
        BATON_UNROLL
        for (uint32_t step = 0; step < kFewK / kFragmentK; ++step) add(step);
      } else {
        for (uint32_t step = 0; step * kFragmentK < k; ++step) add(step);
      }
    });
    block.each_free([&](uint32_t thread) {
      each_of_warp(thread, [&](uint32_t row, uint32_t column, float& sum) {
        store_sum(block, a, row, column, sum);
      });
    });
  }
}

template <class Block>
BATON_DEVICE void gemm_bf16_few(Block& block, const Gemm& a) {
  if (a.m <= 4) {
    few_by_tensor_cores<4>(block, a);
  } else if (a.m <= 8) {
    few_by_tensor_cores<8>(block, a);
  } else {
    few_by_tensor_cores<16>(block, a);
  }
}

// ---- many rows ----

// The pieces of one step, of 8 k each, ordered in a row so that those of eight rows are on
// different banks.
inline constexpr uint32_t kStepPieces = kFragmentK / 8;
BATON_DEVICE uint32_t place_of(uint32_t row, uint32_t piece) {
  return piece ^ row / 2 % kStepPieces;
}
template <uint32_t kSide>
struct TensorStep {
  Vector16 a[kSide][kStepPieces];
  Vector16 w[kSide][kStepPieces];
};
// A warp's part of a tile: so many rows and columns.
template <uint32_t kSide>
struct TensorLeft {
  FragmentA of[kSide / 16];
};
template <uint32_t kSide>
struct TensorRight {
  FragmentB of[kSide / 8];
};
template <uint32_t kSide>
struct TensorSums {
  FragmentC of[kSide / 16 * (kSide / 8)];
};

struct TilePlace {
  uint32_t row;
  uint32_t column;
};
// Tiles that run at the same time are near each other in both directions: they share what they
// read.
template <uint32_t kSide>
BATON_DEVICE TilePlace tile_place(const Gemm& a, uint32_t item) {
  constexpr uint32_t kBand = 16;  // tiles, of columns
  const uint32_t down = pieces_of(a.m, kSide), across = pieces_of(a.n, kSide);
  const uint32_t band = item / (kBand * down), in_band = item % (kBand * down);
  const uint32_t width = smaller(kBand, across - band * kBand);
  return {in_band / width * kSide, (band * kBand + in_band % width) * kSide};
}

// A step of rows [first, ...) of one matrix to shared memory; zeros where there is nothing.
template <uint32_t kRows, class Block>
BATON_DEVICE void bring_rows(Block& block, const uint16_t* from, uint32_t count, uint32_t size,
                             uint32_t first, uint32_t k0, Vector16 (*to)[kStepPieces],
                             uint32_t thread) {
  constexpr uint32_t kDown = kTensorThreads / kStepPieces;  // rows at a time
  static_assert(kRows % kDown == 0 && kDown % (2 * kStepPieces) == 0);
  const uint32_t row = thread / kStepPieces, piece = thread % kStepPieces;
  const uint16_t* at = from + uint64_t{first + row} * size + k0 + piece * 8;
  const uint32_t there = k0 + piece * 8 < size && first + row < count ? count - first - row : 0;
  Vector16* const place = &to[row][place_of(row, piece)];
  BATON_UNROLL
  for (uint32_t i = 0; i < kRows; i += kDown) {
    block.copy_16(place + i * kStepPieces, at, i < there ? 16 : 0);
    at += uint64_t{kDown} * size;
  }
}

// A warp's fragments of a step. Eight lanes name the rows of a piece, for each of four.
template <uint32_t kSide, uint32_t kWarpSide, class Block, class Left, class Right>
BATON_DEVICE void load_warp(Block& block, const TensorStep<kSide>& from, Left& left, Right& right) {
  constexpr uint32_t kDown = kSide / kWarpSide;  // warps
  BATON_UNROLL
  for (uint32_t i = 0; i < kWarpSide / 16; ++i) {
    BATON_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      block.load_fragments(left, i * 2 + half, [&](uint32_t thread) {
        const uint32_t row = thread / 32 % kDown * kWarpSide + i * 16 + thread % 16;
        return &from.a[row][place_of(row, half * 2 + thread % 32 / 16)];
      });
    }
  }
  BATON_UNROLL
  for (uint32_t i = 0; i < kWarpSide / 8; ++i) {
    block.load_fragments(right, i, [&](uint32_t thread) {
      const uint32_t row = thread / 32 / kDown * kWarpSide + i * 8 + thread % 8;
      return &from.w[row][place_of(row, thread % 32 / 8)];
    });
  }
}

template <uint32_t kSide, uint32_t kWarpSide, class Block>
BATON_DEVICE void tensor_tiles(Block& block, const Gemm& a) {
  using Step = TensorStep<kSide>;
  using Sums = TensorSums<kWarpSide>;
  constexpr uint32_t kDown = kSide / kWarpSide;  // warps
  static_assert(kDown * kDown * 32 == kTensorThreads);
  constexpr uint32_t kStages = kTensorBytes / sizeof(Step);
  auto* const stages = reinterpret_cast<Step*>(block.large_shared());
  const uint32_t tiles = pieces_of(a.m, kSide) * pieces_of(a.n, kSide);
  const uint32_t steps = pieces_of(a.k, kFragmentK);
  for (uint32_t item = block.index(); item < tiles; item += block.blocks()) {
    const TilePlace at = tile_place<kSide>(a, item);
    auto left = block.template per_thread<TensorLeft<kWarpSide>>();
    auto right = block.template per_thread<TensorRight<kWarpSide>>();
    auto sums = block.template per_thread<Sums>();
    const auto each_of_tile = [&](uint32_t thread, const auto& function) {
      BATON_UNROLL
      for (uint32_t j = 0; j < sizeof(Sums) / sizeof(FragmentC); ++j) {
        each_sum(thread % 32, at.row + thread / 32 % kDown * kWarpSide + j / (kWarpSide / 8) * 16,
                 at.column + thread / 32 / kDown * kWarpSide + j % (kWarpSide / 8) * 8,
                 [&](uint32_t row, uint32_t column, uint32_t e) {
                   function(row, column, sums[thread].of[j].value[e]);
                 });
      }
    };
    const auto bring = [&](uint32_t thread, uint32_t step) {
      if (step < steps) {
        const uint32_t k0 = step * kFragmentK;
        Step& to = stages[step % kStages];
        bring_rows<kSide>(block, a.w, a.n, a.k, at.column, k0, to.w, thread);
        bring_rows<kSide>(block, a.rounded, a.m, a.k, at.row, k0, to.a, thread);
      }
      block.end_copies();
    };
    block.each_free([&](uint32_t thread) {
      for (uint32_t step = 0; step < kStages - 1; ++step) bring(thread, step);
      each_of_tile(thread, [&](uint32_t row, uint32_t column, float& sum) {
        sum = first_sum(block, a, row, column);
      });
    });
    for (uint32_t step = 0; step < steps; ++step) {
      block.each([&](uint32_t) { block.template wait_copies<kStages - 2>(); });
      load_warp<kSide, kWarpSide>(block, stages[step % kStages], left, right);
      block.each_free([&](uint32_t thread) {
        bring(thread, step + kStages - 1);  // where the step before was read
      });
      block.multiply_fragments(left, right, sums);
    }
    block.each([&](uint32_t thread) {  // all have read their last step before the next tile's first
      each_of_tile(thread, [&](uint32_t row, uint32_t column, float& sum) {
        store_sum(block, a, row, column, sum);
      });
    });
  }
}

template <class Block>
BATON_DEVICE void gemm_bf16(Block& block, const Gemm& a) {
  if (large_bf16_tiles(a.m, a.n)) {
    tensor_tiles<kTensorTile, 64>(block, a);
  } else {
    tensor_tiles<64, 32>(block, a);
  }
}

}  // namespace baton::gpudirect::kernels
