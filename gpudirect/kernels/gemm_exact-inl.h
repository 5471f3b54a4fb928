// Matrix products in fp32, to the bit as the engine's: every sum is one chain in ascending k.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/few_rows-inl.h"

namespace baton::gpudirect::kernels {

// ---- many rows ----

inline constexpr uint32_t kExactThreads = 256;
// k of a step: of small tiles more, for threads wait for each other after each.
template <uint32_t kColumns>
inline constexpr uint32_t kExactK = kColumns == 128 ? 16 : 32;

// Rows of words, anywhere; one of both distances is 1.
struct WordRows {
  const uint32_t* from;
  uint32_t count;
  uint32_t row;  // words from row to row
  uint32_t k;
};

// A step of one side of a tile, transposed: all threads read one k at a time.
template <uint32_t kCount, uint32_t kWords>
struct ExactSide {
  uint32_t at[kWords][kCount + 4];
};
// kPairs: words of b are pairs of numbers in bf16, those of a are numbers.
template <uint32_t kRows, uint32_t kColumns, bool kPairs>
struct ExactStep {
  static constexpr uint32_t kK = kExactK<kColumns>;
  ExactSide<kRows, kK> a;
  ExactSide<kColumns, kPairs ? kK / 2 : kK> b;
};

// Words [k0, k_end) of rows [first, ...), as many as there is room for; zeros where there are none.
template <uint32_t kCount, uint32_t kWords, class Block>
BATON_DEVICE void bring_side(Block& block, const WordRows& rows, uint32_t first, uint32_t k0,
                             uint32_t k_end, ExactSide<kCount, kWords>& to, uint32_t thread) {
  if (rows.k == 1) {
    constexpr uint32_t kDown = kExactThreads / kWords;  // rows that are brought together
    const uint32_t row = thread / kWords, k = thread % kWords;
    const uint32_t* from = rows.from + uint64_t{first + row} * rows.row + k0 + k;
    const uint32_t there =
        k0 + k < k_end && first + row < rows.count ? rows.count - first - row : 0;
    BATON_UNROLL
    for (uint32_t i = 0; i < kCount; i += kDown) {
      block.copy_4(&to.at[k][i + row], from, i < there ? 4 : 0);
      from += uint64_t{kDown} * rows.row;
    }
    return;
  }
  if (rows.k % 4 == 0 && reinterpret_cast<uint64_t>(rows.from) % 16 == 0) {
    each_share<kCount * kWords / 4, kExactThreads>(thread, [&](uint32_t i) {
      const uint32_t row = first + i % (kCount / 4) * 4, k = k0 + i / (kCount / 4);
      const uint32_t there = row < rows.count && k < k_end ? smaller(rows.count - row, 4u) * 4 : 0;
      block.copy_16(&to.at[i / (kCount / 4)][i % (kCount / 4) * 4],
                    rows.from + uint64_t{k} * rows.k + row, there);
    });
    return;
  }
  for (uint32_t i = thread; i < kCount * kWords; i += kExactThreads) {
    const uint32_t row = first + i % kCount, k = k0 + i / kCount;
    block.copy_4(&to.at[i / kCount][i % kCount], rows.from + uint64_t{k} * rows.k + row,
                 row < rows.count && k < k_end ? 4 : 0);
  }
}

// A thread's rows, or columns, of a tile: groups of up to four side by side.
template <uint32_t kCount>
struct OwnShare {
  static constexpr uint32_t kOwn = kCount / 16;
  static constexpr uint32_t kGroup = kOwn < 4 ? kOwn : 4;
  static BATON_DEVICE uint32_t at(uint32_t share, uint32_t i) {
    return i / kGroup * (16 * kGroup) + share * kGroup + i % kGroup;
  }
  static BATON_DEVICE void read(const uint32_t* from, uint32_t share, uint32_t* to) {
    BATON_UNROLL
    for (uint32_t i = 0; i < kOwn; i += kGroup) {
      using Group = Words<kGroup>;
      const Group words = *reinterpret_cast<const Group*>(from + at(share, i));
      BATON_UNROLL
      for (uint32_t e = 0; e < kGroup; ++e) to[i + e] = words.word[e];
    }
  }
};
// The share of each of a tile's 16 x 16 threads. A warp has 8 x 4 of them, its half-warps 8 x 2,
// so that their simultaneous reads fall in 128 bytes.
BATON_DEVICE uint32_t share_of_rows(uint32_t thread) {
  return thread / 32 % 2 * 8 + thread % 16 / 2;
}
BATON_DEVICE uint32_t share_of_columns(uint32_t thread) {
  return thread / 64 * 4 + thread % 32 / 16 * 2 + thread % 2;
}

template <uint32_t kRows, uint32_t kColumns>
struct ExactSums {
  float of[kRows / 16][kColumns / 16];
};

// A tile of c, where it begins and which k it sums over.
struct ExactTile {
  uint32_t row;
  uint32_t column;
  uint32_t k_begin;
  uint32_t k_end;
};

template <uint32_t kRows, uint32_t kColumns>
BATON_DEVICE void add_products(const uint32_t* left, const uint32_t* right,
                               ExactSums<kRows, kColumns>& sums) {
  BATON_UNROLL
  for (uint32_t r = 0; r < kRows / 16; ++r) {
    BATON_UNROLL
    for (uint32_t c = 0; c < kColumns / 16; ++c) {
      sums.of[r][c] = fmaf(float_of(left[r]), float_of(right[c]), sums.of[r][c]);
    }
  }
}
// Number k of a step, or pair k.
template <uint32_t kRows, uint32_t kColumns, bool kPairs>
BATON_DEVICE void add_step(const ExactStep<kRows, kColumns, kPairs>& step, uint32_t k,
                           uint32_t thread, ExactSums<kRows, kColumns>& sums) {
  uint32_t left[kRows / 16], right[kColumns / 16];
  OwnShare<kColumns>::read(step.b.at[k], share_of_columns(thread), right);
  if constexpr (!kPairs) {
    OwnShare<kRows>::read(step.a.at[k], share_of_rows(thread), left);
    add_products(left, right, sums);
  } else {
    uint32_t low[kColumns / 16];
    BATON_UNROLL
    for (uint32_t c = 0; c < kColumns / 16; ++c) {
      low[c] = right[c] << 16;
      right[c] &= 0xffff0000u;
    }
    OwnShare<kRows>::read(step.a.at[2 * k], share_of_rows(thread), left);
    add_products(left, low, sums);
    OwnShare<kRows>::read(step.a.at[2 * k + 1], share_of_rows(thread), left);
    add_products(left, right, sums);
  }
}

// start(row, column) is what a sum begins with, end(row, column, sum) takes it.
template <uint32_t kRows, uint32_t kColumns, bool kPairs, class Block, class Start, class End>
BATON_DEVICE void exact_tile(Block& block, const WordRows& a, const WordRows& b,
                             const ExactTile& at, const Start& start, const End& end) {
  using Step = ExactStep<kRows, kColumns, kPairs>;
  constexpr uint32_t kStages = kExactBytes / sizeof(Step);
  constexpr uint32_t kOfWord = kPairs ? 2 : 1;
  auto* const stages = reinterpret_cast<Step*>(block.large_shared());
  auto all_sums = block.template per_thread<ExactSums<kRows, kColumns>>();
  const uint32_t steps = pieces_of(at.k_end - at.k_begin, Step::kK);
  const auto bring = [&](uint32_t thread, uint32_t step) {
    if (step < steps) {
      const uint32_t k0 = at.k_begin + step * Step::kK;
      Step& to = stages[step % kStages];
      bring_side(block, a, at.row, k0, at.k_end, to.a, thread);
      bring_side(block, b, at.column, k0 / kOfWord, at.k_end / kOfWord, to.b, thread);
    }
    block.end_copies();
  };
  const auto each_of_tile = [&](uint32_t thread, const auto& function) {
    BATON_UNROLL
    for (uint32_t r = 0; r < kRows / 16; ++r) {
      BATON_UNROLL
      for (uint32_t c = 0; c < kColumns / 16; ++c) {
        const uint32_t row = at.row + OwnShare<kRows>::at(share_of_rows(thread), r);
        const uint32_t column = at.column + OwnShare<kColumns>::at(share_of_columns(thread), c);
        function(row, column, all_sums[thread].of[r][c]);
      }
    }
  };
  block.each_free([&](uint32_t thread) {
    for (uint32_t step = 0; step < kStages - 1; ++step) bring(thread, step);
    each_of_tile(thread, [&](uint32_t row, uint32_t column, float& sum) {
      sum = row < a.count && column < b.count ? start(row, column) : 0.0f;
    });
  });
  for (uint32_t step = 0; step < steps; ++step) {
    block.each([&](uint32_t) { block.template wait_copies<kStages - 2>(); });
    block.each_free([&](uint32_t thread) {
      bring(thread, step + kStages - 1);  // where the step before was read
      const Step& from = stages[step % kStages];
      const uint32_t there = at.k_end - at.k_begin - step * Step::kK;
      if (there >= Step::kK) {
        BATON_UNROLL
        for (uint32_t k = 0; k < Step::kK / kOfWord; ++k) {
          add_step(from, k, thread, all_sums[thread]);
        }
      } else {  // a zero more would make a zero of what is -0
        for (uint32_t k = 0; k < there / kOfWord; ++k) add_step(from, k, thread, all_sums[thread]);
      }
    });
  }
  block.each([&](uint32_t thread) {  // all have read their last step before the next tile's first
    each_of_tile(thread, [&](uint32_t row, uint32_t column, float& sum) {
      if (row < a.count && column < b.count) end(row, column, sum);
    });
  });
}

template <uint32_t kRows, uint32_t kColumns, class Block>
BATON_DEVICE void gemm_tiles(Block& block, const Gemm& a) {
  const WordRows left = {reinterpret_cast<const uint32_t*>(a.a), a.m, a.lda, 1};
  const WordRows right = {reinterpret_cast<const uint32_t*>(a.w), a.n, a.k / 2, 1};
  const uint32_t down = pieces_of(a.m, kRows);
  const uint32_t tiles = down * pieces_of(a.n, kColumns);
  for (uint32_t item = block.index(); item < tiles; item += block.blocks()) {
    const ExactTile at = {item % down * kRows, item / down * kColumns, 0, a.k};
    exact_tile<kRows, kColumns, true>(
        block, left, right, at,
        [&](uint32_t row, uint32_t column) {
          return a.accumulate != 0 ? block.load(a.c + uint64_t{row} * a.ldc + column) : 0.0f;
        },
        [&](uint32_t row, uint32_t column, float sum) {
          if (a.bias != nullptr) sum = sum + block.load(a.bias + column);
          block.store(a.c + uint64_t{row} * a.ldc + column, sum);
        });
  }
}

template <class Block>
BATON_DEVICE void gemm(Block& block, const Gemm& a) {
  if (large_tiles(a.m, a.n)) {
    gemm_tiles<128, 128>(block, a);
  } else {
    gemm_tiles<64, 64>(block, a);
  }
}

// ---- few rows ----

template <uint32_t kRows>
struct FewChains {
  float of[kRows / 4];
};

// A block's warps have its columns, a lane each, and share out the rows between them.
template <uint32_t kRows, class Block>
BATON_DEVICE void few_by_chains(Block& block, const Gemm& a) {
  for (uint32_t item = block.index(); item * kFewColumns < a.n; item += block.blocks()) {
    auto chains = block.template per_thread<FewChains<kRows>>();
    const auto each_chain = [&](uint32_t thread, const auto& function) {
      BATON_UNROLL
      for (uint32_t r = 0; r < kRows / 4; ++r) {
        const uint32_t row = r * 4 + thread / 32, column = item * kFewColumns + thread % 32;
        const bool inside = row < a.m && column < a.n;
        function(inside, uint64_t{row} * a.ldc + column, column, chains[thread].of[r]);
      }
    };
    block.each_free([&](uint32_t thread) {
      each_chain(thread, [&](bool inside, uint64_t place, uint32_t, float& sum) {
        sum = inside && a.accumulate != 0 ? block.load(a.c + place) : 0.0f;
      });
    });
    few_steps<kRows>(block, a, item * kFewColumns, [&](const FewStep<kRows>& from, uint32_t k) {
      block.each_free([&](uint32_t thread) {
        if (thread / 32 >= a.m) return;
        const auto add_eight = [&](uint32_t i) {
          const Vector16 w = from.w[thread % 32][i];
          BATON_UNROLL
          for (uint32_t r = 0; r < kRows / 4; ++r) {
            float& sum = chains[thread].of[r];
            BATON_UNROLL
            for (uint32_t half = 0; half < 2; ++half) {
              const Vector16 x = from.a[r * 4 + thread / 32][2 * i + half];
              BATON_UNROLL
              for (uint32_t e = 0; e < 2; ++e) {
                const uint32_t pair = w.word[half * 2 + e];
                sum = fmaf(float_of(x.word[2 * e]), float_of(pair << 16), sum);
                sum = fmaf(float_of(x.word[2 * e + 1]), float_of(pair & 0xffff0000u), sum);
              }
            }
          }
        };
        if (k == kFewK) {
          BATON_UNROLL
          for (uint32_t i = 0; i < kFewK / 8; ++i) add_eight(i);
        } else {
          for (uint32_t i = 0; i < k / 8; ++i) add_eight(i);
        }
      });
    });
    block.each_free([&](uint32_t thread) {
      each_chain(thread, [&](bool inside, uint64_t place, uint32_t column, float& sum) {
        if (!inside) return;
        if (a.bias != nullptr) sum = sum + block.load(a.bias + column);
        block.store(a.c + place, sum);
      });
    });
  }
}

template <class Block>
BATON_DEVICE void gemm_few(Block& block, const Gemm& a) {
  if (a.m <= 4) {
    few_by_chains<4>(block, a);
  } else if (a.m <= 8) {
    few_by_chains<8>(block, a);
  } else {
    few_by_chains<16>(block, a);
  }
}

// Products of fp32 matrices in any of the forms that training has, many at a time; the engine's to
// the bit. Tiles and sums are those above.

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
