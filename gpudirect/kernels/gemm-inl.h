// Matrix products with a weight in bf16: exact as the engine's, and by tensor cores.
//
// A block computes tiles of c, step by step of 32 k that all its threads bring into shared memory
// together. Sums are never split: what a row becomes depends on nothing but the row.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/fragments.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kStepK = 32;
static_assert(kStepK == kFragmentK);

// Tile `item` of c: where it begins.
struct TilePlace {
  uint32_t row;
  uint32_t column;
};
// Neighbours share rows of the weight, which is larger than a.
template <uint32_t kRows>
BATON_DEVICE TilePlace tile_place(const Gemm& a, uint32_t item) {
  const uint32_t down = pieces_of(a.m, kRows);
  return {item % down * kRows, item / down * kTileColumns};
}

// ---- exact ----

// Of one step, transposed: all threads read one k at a time.
template <uint32_t kRows>
struct alignas(16) ExactStep {
  float a[kStepK][kRows + 4];
  float w[kStepK][kTileColumns + 4];
};
// A thread's part of a tile: kRows / 8 rows of 4 columns.
template <uint32_t kRows>
struct ExactSums {
  float of[kRows / 8][4];
};

template <uint32_t kRows, class Block>
BATON_DEVICE void load_step(Block& block, const Gemm& a, const TilePlace& at, uint32_t k0,
                            ExactStep<kRows>& step, uint32_t thread) {
  for (uint32_t i = thread; i < kRows * kStepK / 4; i += block.threads()) {
    const uint32_t row = i / (kStepK / 4), k = i % (kStepK / 4) * 4;
    Vector16 four = {};
    if (at.row + row < a.m && k0 + k < a.k) {
      four = block.load(
          reinterpret_cast<const Vector16*>(a.a + uint64_t{at.row + row} * a.lda + k0 + k));
    }
    for (uint32_t e = 0; e < 4; ++e) step.a[k + e][row] = float_of(four.word[e]);
  }
  for (uint32_t i = thread; i < kTileColumns * kStepK / 8; i += block.threads()) {
    const uint32_t column = i / (kStepK / 8), k = i % (kStepK / 8) * 8;
    Vector16 eight = {};
    if (at.column + column < a.n && k0 + k < a.k) {
      eight = block.load(
          reinterpret_cast<const Vector16*>(a.w + uint64_t{at.column + column} * a.k + k0 + k));
    }
    for (uint32_t e = 0; e < 4; ++e) {
      step.w[k + 2 * e][column] = float_of(eight.word[e] << 16);
      step.w[k + 2 * e + 1][column] = float_of(eight.word[e] & 0xffff0000u);
    }
  }
}

template <uint32_t kRows>
BATON_DEVICE void add_step(const ExactStep<kRows>& step, uint32_t k, uint32_t thread,
                           ExactSums<kRows>& sums) {
  const uint32_t row = thread / 16 * (kRows / 8), column = thread % 16 * 4;
  float left[kRows / 8], right[4];
  for (uint32_t r = 0; r < kRows / 8; ++r) left[r] = step.a[k][row + r];
  for (uint32_t c = 0; c < 4; ++c) right[c] = step.w[k][column + c];
  for (uint32_t r = 0; r < kRows / 8; ++r) {
    for (uint32_t c = 0; c < 4; ++c) sums.of[r][c] = fmaf(left[r], right[c], sums.of[r][c]);
  }
}

template <uint32_t kRows, class Block>
BATON_DEVICE void exact_tiles(Block& block, const Gemm& a, ExactStep<kRows>& step) {
  const uint32_t tiles = pieces_of(a.m, kRows) * pieces_of(a.n, kTileColumns);
  for (uint32_t item = block.index(); item < tiles; item += block.blocks()) {
    const TilePlace at = tile_place<kRows>(a, item);
    auto all_sums = block.template per_thread<ExactSums<kRows>>();
    const auto each_sum = [&](uint32_t thread, const auto& function) {
      const uint32_t row = at.row + thread / 16 * (kRows / 8);
      const uint32_t column = at.column + thread % 16 * 4;
      for (uint32_t r = 0; r < kRows / 8; ++r) {
        for (uint32_t c = 0; c < 4; ++c) {
          const bool inside = row + r < a.m && column + c < a.n;
          function(inside, row + r, column + c, all_sums[thread].of[r][c]);
        }
      }
    };
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint32_t row, uint32_t column, float& sum) {
        const bool starts = inside && a.accumulate != 0;
        sum = starts ? block.load(a.c + uint64_t{row} * a.ldc + column) : 0.0f;
      });
    });
    for (uint32_t k0 = 0; k0 < a.k; k0 += kStepK) {
      block.each([&](uint32_t thread) { load_step<kRows>(block, a, at, k0, step, thread); });
      block.each([&](uint32_t thread) {
        if (k0 + kStepK <= a.k) {
          BATON_UNROLL_BY_4
          for (uint32_t k = 0; k < kStepK; ++k) add_step<kRows>(step, k, thread, all_sums[thread]);
        } else {
          for (uint32_t k = 0; k < a.k - k0; ++k)
            add_step<kRows>(step, k, thread, all_sums[thread]);
        }
      });
    }
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint32_t row, uint32_t column, float& sum) {
        if (!inside) return;
        if (a.bias != nullptr) sum = sum + block.load(a.bias + column);
        block.store(a.c + uint64_t{row} * a.ldc + column, sum);
      });
    });
  }
}

template <class Block>
BATON_DEVICE void gemm(Block& block, const Gemm& a) {
  if (a.m <= kFewRows) {
    exact_tiles<kFewRows>(block, a, *block.template shared<ExactStep<kFewRows>, 1>());
  } else {
    exact_tiles<kTileRows>(block, a, *block.template shared<ExactStep<kTileRows>, 1>());
  }
}

// ---- by tensor cores ----

// Of one step, in bf16, two k to a word; the padding puts the lanes of a warp on different banks.
inline constexpr uint32_t kStepWords = kStepK / 2 + 4;
template <uint32_t kRows>
struct alignas(16) TensorStep {
  uint32_t a[kRows][kStepWords];
  uint32_t w[kTileColumns][kStepWords];
};
// A warp's part of a tile, a lane's share of it: 16 rows, and all columns (four warps one below the
// other) or, of few rows, a fourth of them.
template <uint32_t kRows>
struct TensorSums {
  static constexpr uint32_t kCount = kTileColumns / 8 / (kRows == kFewRows ? 4 : 1);
  FragmentC of[kCount];
};

template <uint32_t kRows, class Block>
BATON_DEVICE void load_step(Block& block, const Gemm& a, const TilePlace& at, uint32_t k0,
                            TensorStep<kRows>& step, uint32_t thread) {
  for (uint32_t i = thread; i < kRows * kStepK / 4; i += block.threads()) {
    const uint32_t row = i / (kStepK / 4), k = i % (kStepK / 4) * 4;
    Vector16 four = {};
    if (at.row + row < a.m && k0 + k < a.k) {
      four = block.load(
          reinterpret_cast<const Vector16*>(a.a + uint64_t{at.row + row} * a.lda + k0 + k));
    }
    for (uint32_t e = 0; e < 2; ++e) {
      step.a[row][k / 2 + e] =
          to_bf16(float_of(four.word[2 * e])) | to_bf16(float_of(four.word[2 * e + 1])) << 16;
    }
  }
  for (uint32_t i = thread; i < kTileColumns * kStepK / 8; i += block.threads()) {
    const uint32_t column = i / (kStepK / 8), k = i % (kStepK / 8) * 8;
    Vector16 eight = {};
    if (at.column + column < a.n && k0 + k < a.k) {
      eight = block.load(
          reinterpret_cast<const Vector16*>(a.w + uint64_t{at.column + column} * a.k + k0 + k));
    }
    for (uint32_t e = 0; e < 4; ++e) step.w[column][k / 2 + e] = eight.word[e];
  }
}

template <uint32_t kRows, class Block>
BATON_DEVICE void tensor_tiles(Block& block, const Gemm& a, TensorStep<kRows>& step) {
  using Sums = TensorSums<kRows>;
  const uint32_t tiles = pieces_of(a.m, kRows) * pieces_of(a.n, kTileColumns);
  for (uint32_t item = block.index(); item < tiles; item += block.blocks()) {
    const TilePlace at = tile_place<kRows>(a, item);
    auto sums = block.template per_thread<Sums>();
    auto left = block.template per_thread<FragmentA>();
    auto right = block.template per_thread<FragmentB>();
    // Of the tile, in which this thread's warp begins.
    const auto first_row = [](uint32_t thread) { return kRows == kFewRows ? 0 : thread / 32 * 16; };
    const auto first_column = [](uint32_t thread) {
      return kRows == kFewRows ? thread / 32 * (kTileColumns / 4) : 0;
    };
    const auto each_sum = [&](uint32_t thread, const auto& function) {
      for (uint32_t j = 0; j < Sums::kCount; ++j) {
        for (uint32_t e = 0; e < 4; ++e) {
          const uint32_t row = at.row + first_row(thread) + thread % 32 / 4 + e / 2 * 8;
          const uint32_t column = at.column + first_column(thread) + j * 8 + thread % 4 * 2 + e % 2;
          function(row < a.m && column < a.n, row, column, sums[thread].of[j].value[e]);
        }
      }
    };
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint32_t row, uint32_t column, float& sum) {
        const bool starts = inside && a.accumulate != 0;
        sum = starts ? block.load(a.c + uint64_t{row} * a.ldc + column) : 0.0f;
      });
    });
    for (uint32_t k0 = 0; k0 < a.k; k0 += kStepK) {
      block.each([&](uint32_t thread) { load_step<kRows>(block, a, at, k0, step, thread); });
      block.each_warp([&](uint32_t thread) {
        const uint32_t row = first_row(thread) + thread % 32 / 4, t = thread % 4;
        for (uint32_t half = 0; half < 2; ++half) {
          for (uint32_t e = 0; e < 4; ++e) {
            left[thread].word[half * 4 + e] = step.a[row + e % 2 * 8][half * 8 + t + e / 2 * 4];
          }
        }
      });
      BATON_UNROLL
      for (uint32_t j = 0; j < Sums::kCount; ++j) {
        block.each_warp([&](uint32_t thread) {
          const uint32_t column = first_column(thread) + j * 8 + thread % 32 / 4, t = thread % 4;
          for (uint32_t e = 0; e < 4; ++e) right[thread].word[e] = step.w[column][t + e * 4];
        });
        block.multiply_fragments(left, right, sums, j);
      }
      block.each([](uint32_t) {});  // all have read the step before the next one is written
    }
    block.each([&](uint32_t thread) {
      each_sum(thread, [&](bool inside, uint32_t row, uint32_t column, float& sum) {
        if (!inside) return;
        if (a.bias != nullptr) sum = sum + block.load(a.bias + column);
        block.store(a.c + uint64_t{row} * a.ldc + column, sum);
      });
    });
  }
}

template <class Block>
BATON_DEVICE void gemm_bf16(Block& block, const Gemm& a) {
  if (a.m <= kFewRows) {
    tensor_tiles<kFewRows>(block, a, *block.template shared<TensorStep<kFewRows>, 1>());
  } else {
    tensor_tiles<kTileRows>(block, a, *block.template shared<TensorStep<kTileRows>, 1>());
  }
}

}  // namespace baton::gpudirect::kernels
