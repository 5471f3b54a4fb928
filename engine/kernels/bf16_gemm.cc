// bf16_gemm: rounding and packing, kernels for every vector width, and who multiplies what.
#include "engine/kernels/bf16_gemm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/kernels/amx.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/bf16_gemm.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::CappedTag<float, 16>;
using U = hn::RebindToUnsigned<F>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(F()));
constexpr int kStep = 32, kColumns = 32, kSixRows = 6;
// Two sums for each row and vector, half of B, and A: 32 registers, or 16. Every factor of A serves
// two vectors: with one, loads would take longer than multiply-adds.
constexpr int kVectors = 2;
constexpr int kRowsAtOnce = HWY_MAX_BYTES >= 64 ? 6 : 3;
constexpr int kStepsAtOnce = 12;

// As bf16_from_float(), in the lower halves.
BATON_INLINE hn::Vec<U> round_to_bf16(hn::Vec<F> x) {
  const U u;
  const hn::RebindToSigned<F> s;
  const auto bits = hn::BitCast(u, x);
  const auto high = hn::ShiftRight<16>(bits);
  const auto up = hn::Add(hn::And(high, hn::Set(u, 1)), hn::Set(u, 0x7fff));
  const auto magnitude = hn::BitCast(s, hn::And(bits, hn::Set(u, 0x7fffffff)));
  const auto is_nan = hn::RebindMask(u, hn::Gt(magnitude, hn::Set(s, 0x7f800000)));
  return hn::IfThenElse(is_nan, hn::Or(high, hn::Set(u, 0x40)),
                        hn::ShiftRight<16>(hn::Add(bits, up)));
}

// Rounds up to 16 rows into tiles [ceil(k / 32)][16][32], and pads k with zeros.
void round_into_tiles(const float* a, size_t lda, int rows, int k, uint16_t* HWY_RESTRICT to) {
  const hn::Rebind<uint16_t, F> half;
  for (int row = 0; row < rows; ++row) {
    const float* from = a + static_cast<size_t>(row) * lda;
    uint16_t* line = to + row * kStep;
    int at = 0;
    for (; at + kStep <= k; at += kStep, line += 16 * kStep) {
      BATON_UNROLL
      for (int i = 0; i < kStep; i += kLanes) {
        const auto rounded = round_to_bf16(hn::LoadU(F(), from + at + i));
        hn::StoreU(hn::TruncateTo(half, rounded), half, line + i);
      }
    }
    if (at == k) continue;
    for (int i = 0; i < kStep; ++i) {
      line[i] = at + i < k ? bf16_from_float(from[at + i]) : uint16_t{0};
    }
  }
}

// Rounds up to six rows of A into fp32, by columns: [ceil(k / 32) * 32][6], padded with zeros.
void round_into_columns(const float* a, size_t lda, int rows, int k, float* HWY_RESTRICT to) {
  HWY_ALIGN float line[kSixRows][kStep] = {};
  for (int at = 0; at < k; at += kStep, to += kStep * kSixRows) {
    for (int row = 0; row < rows; ++row) {
      const float* from = a + static_cast<size_t>(row) * lda + at;
      if (at + kStep <= k) {
        BATON_UNROLL
        for (int i = 0; i < kStep; i += kLanes) {
          const auto rounded = round_to_bf16(hn::LoadU(F(), from + i));
          hn::Store(hn::BitCast(F(), hn::ShiftLeft<16>(rounded)), F(), line[row] + i);
        }
      } else {
        for (int i = 0; i < kStep; ++i) {
          line[row][i] = at + i < k ? float_from_bf16(bf16_from_float(from[i])) : 0.0f;
        }
      }
    }
    for (int i = 0; i < kStep; ++i) {
      BATON_UNROLL
      for (int row = 0; row < kSixRows; ++row) to[i * kSixRows + row] = line[row][i];
    }
  }
}

// Where vector `v` of some columns lies behind the first: columns are in tiles of 16.
constexpr int next_vector(int v) { return kLanes == 16 ? v * 256 : v * kLanes; }

// `kRows` rows of A [steps * 32][6] times one panel.
template <int kRows>
HWY_NOINLINE void strip(const float* HWY_RESTRICT a, const uint16_t* HWY_RESTRICT panel, int steps,
                        float* HWY_RESTRICT c, size_t ldc, bool load_c) {
  const F f;
  const U u;
  for (int first = 0; first < kColumns; first += kVectors * kLanes) {
    const auto* b = reinterpret_cast<const uint32_t*>(panel);
    const float* row = a;
    for (int step = 0; step < steps; ++step) {
      hn::Vec<F> even[kRows][kVectors], odd[kRows][kVectors];
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = hn::Zero(f);
      }
      for (int pair = 0; pair < kStep / 2; ++pair) {
        // First the even k, then the odd: so only one half of B is in registers.
        hn::Vec<F> half[kVectors];
        const auto* both = b + first / 16 * 256 + pair * 16 + first % 16;
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          half[v] = hn::BitCast(f, hn::ShiftLeft<16>(hn::LoadU(u, both + next_vector(v))));
        }
        BATON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const auto factor = hn::Set(f, row[r]);
          BATON_UNROLL
          for (int v = 0; v < kVectors; ++v) even[r][v] = hn::MulAdd(factor, half[v], even[r][v]);
        }
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          half[v] =
              hn::BitCast(f, hn::And(hn::LoadU(u, both + next_vector(v)), hn::Set(u, 0xffff0000)));
        }
        BATON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const auto factor = hn::Set(f, row[kSixRows + r]);
          BATON_UNROLL
          for (int v = 0; v < kVectors; ++v) odd[r][v] = hn::MulAdd(factor, half[v], odd[r][v]);
        }
        row += 2 * kSixRows;
      }
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          float* at = c + static_cast<size_t>(r) * ldc + first + v * kLanes;
          const auto before = load_c || step > 0 ? hn::LoadU(f, at) : hn::Zero(f);
          hn::StoreU(hn::Add(before, hn::Add(even[r][v], odd[r][v])), f, at);
        }
      }
      b += 512;
    }
  }
}

// Up to six rows and 32 columns of C. Sums are made in a copy: rows of C may be a power of two
// apart, and then push each other out of L1.
void tile(const float* a, const uint16_t* panel, int steps, float* c, size_t ldc, int rows,
          int columns, bool load_c) {
  HWY_ALIGN float copy[kSixRows * kColumns] = {};
  for (int r = 0; load_c && r < rows; ++r) {
    std::copy_n(c + static_cast<size_t>(r) * ldc, columns, copy + r * kColumns);
  }
  int r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) {
    strip<kRowsAtOnce>(a + r, panel, steps, copy + r * kColumns, kColumns, load_c);
  }
  for (; r + 2 <= rows; r += 2) {
    strip<2>(a + r, panel, steps, copy + r * kColumns, kColumns, load_c);
  }
  if (r < rows) strip<1>(a + r, panel, steps, copy + r * kColumns, kColumns, load_c);
  for (r = 0; r < rows; ++r) {
    std::copy_n(copy + r * kColumns, columns, c + static_cast<size_t>(r) * ldc);
  }
}

// A lies as [ceil(rows / 6)][steps * 32][6].
void multiply_vectors(const float* a, const uint16_t* b, int steps, int rows, int columns, float* c,
                      size_t ldc, bool accumulate) {
  const size_t a_strip = static_cast<size_t>(steps) * kStep * kSixRows;
  const size_t b_panel = static_cast<size_t>(steps) * kStep * kColumns;
  for (int step = 0; step < steps; step += kStepsAtOnce) {
    const int some = std::min(kStepsAtOnce, steps - step);
    for (int column = 0; column < columns; column += kColumns) {
      const uint16_t* panel = b + static_cast<size_t>(column / kColumns) * b_panel +
                              static_cast<size_t>(step) * kStep * kColumns;
      for (int row = 0; row < rows; row += kSixRows) {
        tile(a + static_cast<size_t>(row / kSixRows) * a_strip +
                 static_cast<size_t>(step) * kStep * kSixRows,
             panel, some, c + static_cast<size_t>(row) * ldc + column, ldc,
             std::min(kSixRows, rows - row), std::min(kColumns, columns - column),
             accumulate || step > 0);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(round_into_columns);
HWY_EXPORT(round_into_tiles);
HWY_EXPORT(multiply_vectors);

namespace {

constexpr int kStep = 32, kTile = 16, kSixRows = 6;
// Products smaller than this are not worth waking a second thread for.
constexpr int64_t kSerialOperations = 200'000;
// Rows and panels of one task: its A and C stay in L2.
constexpr int kMostRows = 576;
constexpr int kBlockPanels = 8;
// Rows of tasks are a multiple of it: whole pairs of tiles, and whole strips.
constexpr int kRowUnit = 96;
static_assert(kRowUnit % (2 * kTile) == 0 && kRowUnit % kSixRows == 0);
static_assert(kMostRows % kRowUnit == 0);

int steps_of(int k) { return (k + kStep - 1) / kStep; }
int rounded_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Tiny numbers are zero while this lives, as they are for tiles.
class TinyIsZero {
 public:
#if defined(__x86_64__)
  TinyIsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~TinyIsZero() { _mm_setcsr(before_); }
  TinyIsZero(const TinyIsZero&) = delete;
  TinyIsZero& operator=(const TinyIsZero&) = delete;

 private:
  unsigned before_;
#endif
};

}  // namespace

Bf16Unit best_bf16_unit() { return amx_usable() ? Bf16Unit::kTiles : Bf16Unit::kVectors; }

size_t tiled_elements(int k, int n) {
  return static_cast<size_t>(panels_of(n)) * kPanelColumns * static_cast<size_t>(steps_of(k)) *
         kStep;
}

void pack_tiles(int k, int n, const uint16_t* weight, uint16_t* out) {
  for (int tile_column = 0; tile_column < 2 * panels_of(n); ++tile_column) {
    for (int step = 0; step < steps_of(k); ++step) {
      // Tiles of a panel lie in turns.
      uint16_t* tile =
          out + ((static_cast<size_t>(tile_column / 2) * static_cast<size_t>(steps_of(k)) +
                  static_cast<size_t>(step)) *
                     2 +
                 static_cast<size_t>(tile_column % 2)) *
                    kStep * kTile;
      for (int i = 0; i < kStep; ++i) {
        for (int j = 0; j < kTile; ++j) {
          const int row = step * kStep + i, column = tile_column * kTile + j;
          tile[i / 2 * kStep + 2 * j + i % 2] =
              row < k && column < n ? weight[static_cast<size_t>(column) * k + row] : uint16_t{0};
        }
      }
    }
  }
}

Bf16Scratch::Bf16Scratch(Bf16Unit unit, int max_rows, int max_k, int threads) : unit_(unit) {
  const size_t columns = static_cast<size_t>(steps_of(max_k)) * kStep;
  if (unit == Bf16Unit::kTiles) {
    rounded_ = AlignedArray<uint16_t>(static_cast<size_t>(rounded_up(max_rows, kTile)) * columns);
    const size_t rows = static_cast<size_t>(std::min(kMostRows, rounded_up(max_rows, kTile)));
    for (int i = 0; i < threads; ++i) sums_.emplace_back(rows * kBlockPanels * kPanelColumns);
  } else {
    widened_ = AlignedArray<float>(static_cast<size_t>(rounded_up(max_rows, kSixRows)) * columns);
  }
}

size_t Bf16Scratch::bytes() const {
  const size_t sums = sums_.empty() ? 0 : sums_.size() * sums_[0].size();
  return rounded_.size() * sizeof(uint16_t) + (widened_.size() + sums) * sizeof(float);
}

void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
               const TiledB& b, float* c, size_t ldc, bool accumulate) {
  const bool tiles = scratch.unit_ == Bf16Unit::kTiles;
  const int steps = steps_of(b.k), panels = panels_of(b.n);
  const size_t padded = static_cast<size_t>(steps) * kStep;
  const bool serial = pool.size() == 1 || int64_t{m} * b.n * b.k < kSerialOperations;
  const auto for_tasks = [&](int64_t tasks, auto&& fn) {
    if (serial || tasks == 1) {
      for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
    } else {
      pool.parallel_for(tasks, fn);
    }
  };

  const int strip = tiles ? kTile : kSixRows;
  for_tasks((m + strip - 1) / strip, [&](int64_t task, int) {
    const size_t row = static_cast<size_t>(task) * static_cast<size_t>(strip);
    const int count = std::min(strip, m - static_cast<int>(row));
    if (tiles) {
      HWY_DYNAMIC_DISPATCH(round_into_tiles)
      (a + row * lda, lda, count, b.k, scratch.rounded_.data() + row * padded);
    } else {
      HWY_DYNAMIC_DISPATCH(round_into_columns)
      (a + row * lda, lda, count, b.k, scratch.widened_.data() + row * padded);
    }
  });

  const int group = std::clamp(panels / (4 * pool.size()) & ~1, 2, kBlockPanels);
  const int groups = (panels + group - 1) / group;
  // Alike in size: each of them reads all of B.
  const int row_blocks = (m + kMostRows - 1) / kMostRows;
  const int block_rows = rounded_up((m + row_blocks - 1) / row_blocks, kRowUnit);
  // Of few rows B is read from memory, and each thread reads on where it was.
  const int threads = m <= kTile ? std::min(pool.size(), groups) : 1;
  const int of_each = groups / threads, and_one = groups % threads;
  const auto place = [&](int at) {
    const int thread = at % threads;
    return thread * of_each + std::min(thread, and_one) + at / threads;
  };
  for_tasks(int64_t{groups} * row_blocks, [&](int64_t task, int thread) {
    const int panel = place(static_cast<int>(task % groups)) * group;
    const size_t row = static_cast<size_t>(task / groups) * static_cast<size_t>(block_rows);
    const int rows = std::min(block_rows, m - static_cast<int>(row));
    if (rows <= 0) return;
    const int columns = std::min(group * kPanelColumns, b.n - panel * kPanelColumns);
    const uint16_t* panel_data = b.data + static_cast<size_t>(panel) * kPanelColumns * padded;
    float* to = c + row * ldc + static_cast<size_t>(panel) * kPanelColumns;
    if (tiles) {
      multiply_tiles({.a = scratch.rounded_.data() + row * padded,
                      .b = panel_data,
                      .c = to,
                      .sums = scratch.sums_[static_cast<size_t>(thread)].data(),
                      .ldc = ldc,
                      .rows = rows,
                      .columns = columns,
                      .steps = steps,
                      .accumulate = accumulate});
    } else {
      const TinyIsZero tiny_is_zero;
      HWY_DYNAMIC_DISPATCH(multiply_vectors)
      (scratch.widened_.data() + row * padded, panel_data, steps, rows, columns, to, ldc,
       accumulate);
    }
  });
}

void reference_gemm_bf16(int m, int n, int k, const float* a, size_t lda, const uint16_t* weight,
                         float* c, size_t ldc, bool accumulate) {
  const auto flushed = [](float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
  };
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = accumulate ? flushed(c[size_t(i) * ldc + size_t(j)]) : 0.0f;
      for (int first = 0; first < k; first += kStep) {
        float halves[2] = {0.0f, 0.0f};
        for (int x = first; x < first + kStep; ++x) {
          const float left =
              x < k ? float_from_bf16(bf16_from_float(a[size_t(i) * lda + size_t(x)])) : 0.0f;
          const float right =
              x < k ? float_from_bf16(weight[size_t(j) * size_t(k) + size_t(x)]) : 0.0f;
          halves[x % 2] = flushed(std::fma(flushed(left), flushed(right), halves[x % 2]));
        }
        sum = flushed(sum + flushed(halves[0] + halves[1]));
      }
      c[size_t(i) * ldc + size_t(j)] = sum;
    }
  }
}

}  // namespace baton::engine
#endif  // HWY_ONCE
