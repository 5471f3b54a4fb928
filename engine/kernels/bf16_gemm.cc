// bf16_gemm: rounding and packing, kernels for every vector width, and what multiplies what.
#include "engine/kernels/bf16_gemm.h"

#include <algorithm>

#include "engine/kernels/amx.h"
#include "engine/kernels/bf16_dot.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/bf16_gemm.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "engine/kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {

using U = hn::RebindToUnsigned<F>;
constexpr int kWidth = static_cast<int>(kLanes);
constexpr int kStep = 32, kColumns = 32, kSixRows = 6;
// Two sums for each row and vector, half of B, and A: 32 registers, or 16. Every factor of A serves
// two vectors: with one, loads would take longer than multiply-adds.
constexpr int kVectors = 2;
constexpr int kRowsAtOnce = HWY_MAX_BYTES >= 64 ? 6 : 3;
constexpr int kStepsAtOnce = 12;

// Rounds up to 16 rows into tiles [ceil(k / 32)][16][32], and pads k with zeros.
void round_into_tiles(const float* a, size_t lda, int rows, int k, uint16_t* HWY_RESTRICT to) {
  const hn::Rebind<uint16_t, F> half;
  for (int row = 0; row < rows; ++row) {
    const float* from = a + static_cast<size_t>(row) * lda;
    uint16_t* line = to + row * kStep;
    int at = 0;
    for (; at + kStep <= k; at += kStep, line += 16 * kStep) {
      BATON_UNROLL
      for (int i = 0; i < kStep; i += kWidth) {
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

// Rounds swiglu of blocks of gate and up, whose rows are `stride` long, into tiles: those of 16
// rows are `strip` elements apart.
void gate_into_tiles(const float* gate, const float* up, size_t stride, int rows, int columns,
                     uint16_t* HWY_RESTRICT to, size_t strip) {
  const hn::Rebind<uint16_t, F> half;
  const F f;
  for (int row = 0; row < rows; ++row) {
    const size_t from = static_cast<size_t>(row) * stride;
    uint16_t* line = to + static_cast<size_t>(row / 16) * strip + row % 16 * kStep;
    for (int at = 0; at < columns; at += kStep, line += 16 * kStep) {
      BATON_UNROLL
      for (int i = 0; i < kStep; i += kWidth) {
        const size_t place = from + static_cast<size_t>(at + i);
        const V value = swiglu_vector(hn::LoadU(f, gate + place), hn::LoadU(f, up + place));
        hn::StoreU(hn::TruncateTo(half, round_to_bf16(value)), half, line + i);
      }
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
        for (int i = 0; i < kStep; i += kWidth) {
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
constexpr int next_vector(int v) { return kWidth == 16 ? v * 256 : v * kWidth; }

// `kRows` rows of A [steps * 32][6] times one panel.
template <int kRows>
HWY_NOINLINE void strip(const float* HWY_RESTRICT a, const uint16_t* HWY_RESTRICT panel, int steps,
                        float* HWY_RESTRICT c, size_t ldc, bool load_c) {
  const F f;
  const U u;
  for (int first = 0; first < kColumns; first += kVectors * kWidth) {
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
          float* at = c + static_cast<size_t>(r) * ldc + first + v * kWidth;
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
HWY_EXPORT(gate_into_tiles);
HWY_EXPORT(multiply_vectors);

namespace {

constexpr int kStep = 32, kTile = 16, kSixRows = 6;
// Products smaller than this are not worth waking a second thread for.
constexpr int64_t kSerialOperations = 200'000;
// Rows and panels of one task: its A and C stay in L2.
constexpr int kMostRows = 576;
constexpr int kBlockPanels = 8;
// Rows of a vector kernel's task are a multiple of it: whole strips of either kind. So many rows
// are what a thread should have at least.
constexpr int kRowUnit = 96;
static_assert(kRowUnit % (3 * kTile) == 0 && kRowUnit % kSixRows == 0 && kMostRows % kRowUnit == 0);

// Rows of a block of gate and up: they stay in L2, and dots pair a panel for all of them.
constexpr int rows_gated(Bf16Unit unit) {
  return unit == Bf16Unit::kDots ? 3 * kRowUnit : kRowUnit;
}

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

template <typename Fn>
void for_tasks(ComputePool& pool, bool serial, int64_t tasks, Fn&& fn) {
  if (serial || tasks == 1) {
    for (int64_t task = 0; task < tasks; ++task) fn(task, 0);
  } else {
    pool.parallel_for(tasks, fn);
  }
}

}  // namespace

bool usable(Bf16Unit unit) {
  if (unit == Bf16Unit::kTiles) return amx_usable();
  return unit == Bf16Unit::kVectors || dots_usable();
}

Bf16Unit best_bf16_unit() {
  if (amx_usable()) return Bf16Unit::kTiles;
  return dots_usable() ? Bf16Unit::kDots : Bf16Unit::kVectors;
}

const char* unit_name(Bf16Unit unit) {
  if (unit == Bf16Unit::kTiles) return "AMX";
  return unit == Bf16Unit::kDots ? "vdpbf16ps" : "fp32 vectors";
}

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

Bf16Scratch::Bf16Scratch(Bf16Unit unit, int max_rows, int max_k, int threads, int max_hidden)
    : unit_(unit) {
  const size_t columns = static_cast<size_t>(steps_of(max_k)) * kStep;
  if (unit == Bf16Unit::kVectors) {
    widened_ = AlignedArray<float>(static_cast<size_t>(rounded_up(max_rows, kSixRows)) * columns);
    return;
  }
  const size_t strips = static_cast<size_t>(rounded_up(max_rows, kTile) / kTile);
  rounded_ = AlignedArray<uint16_t>(strips * strip_elements(max_k));
  if (unit == Bf16Unit::kTiles) {
    const size_t rows = std::min(size_t{kMostRows}, strips * kTile);
    for (int i = 0; i < threads; ++i) sums_.emplace_back(rows * kBlockPanels * kPanelColumns);
  }
  if (max_hidden == 0) return;
  max_hidden_ = max_hidden;
  hidden_ = AlignedArray<uint16_t>(strips * strip_elements(max_hidden));
  const size_t gated = size_t{2} * static_cast<size_t>(rows_gated(unit)) * 2 * kPanelColumns;
  for (int i = 0; i < threads; ++i) gated_.emplace_back(gated);
}

size_t Bf16Scratch::bytes() const {
  size_t floats = widened_.size();
  for (const auto* arrays : {&sums_, &gated_}) {
    if (!arrays->empty()) floats += arrays->size() * (*arrays)[0].size();
  }
  return (rounded_.size() + hidden_.size()) * sizeof(uint16_t) + floats * sizeof(float);
}

bool Bf16Scratch::takes_hidden(int hidden) const {
  return hidden % kPanelColumns == 0 && hidden <= max_hidden_;
}

void Bf16Scratch::round(ComputePool& pool, int m, const float* a, size_t lda, int k, bool serial) {
  const bool vectors = unit_ == Bf16Unit::kVectors;
  const size_t padded = static_cast<size_t>(steps_of(k)) * kStep;
  const int strip = vectors ? kSixRows : kTile;
  for_tasks(pool, serial, (m + strip - 1) / strip, [&](int64_t task, int) {
    const size_t row = static_cast<size_t>(task) * static_cast<size_t>(strip);
    const int count = std::min(strip, m - static_cast<int>(row));
    if (vectors) {
      HWY_DYNAMIC_DISPATCH(round_into_columns)
      (a + row * lda, lda, count, k, widened_.data() + row * padded);
      return;
    }
    uint16_t* to = rounded_.data() + row / kTile * strip_elements(k);
    HWY_DYNAMIC_DISPATCH(round_into_tiles)(a + row * lda, lda, count, k, to);
    if (unit_ == Bf16Unit::kDots) pair_for_dots(to, steps_of(k), count);
  });
}

void Bf16Scratch::multiply(ComputePool& pool, const uint16_t* rounded, int m, const TiledB& b,
                           float* c, size_t ldc, bool accumulate, bool serial) {
  const bool vectors = unit_ == Bf16Unit::kVectors;
  const int steps = steps_of(b.k), panels = panels_of(b.n);
  const size_t padded = static_cast<size_t>(steps) * kStep;
  const int group = std::clamp(panels / (4 * pool.size()) & ~1, 2, kBlockPanels);
  const int groups = (panels + group - 1) / group;
  // Alike in size: each of them reads all of B.
  int row_blocks = (m + kMostRows - 1) / kMostRows;
  // Where groups are few and odd in number, one thread would have a whole one more than another.
  if (groups % pool.size() != 0 && m >= 4 * kRowUnit && groups < 8 * pool.size()) {
    row_blocks = std::max(row_blocks, std::min(pool.size(), m / (2 * kRowUnit)));
  }
  const int block_rows = rounded_up((m + row_blocks - 1) / row_blocks, vectors ? kRowUnit : kTile);
  // For few rows, B is read from memory, and each thread continues where it was.
  const int threads = m <= kTile ? std::min(pool.size(), groups) : 1;
  const int of_each = groups / threads, and_one = groups % threads;
  const auto place = [&](int at) {
    const int thread = at % threads;
    return thread * of_each + std::min(thread, and_one) + at / threads;
  };
  // Threads take groups in turns, so the next of each is about as many on.
  const int stride = (serial ? 1 : pool.size()) * group;
  const auto next_of = [&](int panel, int columns) -> const uint16_t* {
    const bool is_there = m > kTile && (panel + stride) * kPanelColumns + columns <= b.n;
    return is_there ? b.data + static_cast<size_t>(panel + stride) * kPanelColumns * padded
                    : nullptr;
  };
  for_tasks(pool, serial, int64_t{groups} * row_blocks, [&](int64_t task, int thread) {
    const int panel = place(static_cast<int>(task % groups)) * group;
    const size_t row = static_cast<size_t>(task / groups) * static_cast<size_t>(block_rows);
    const int rows = std::min(block_rows, m - static_cast<int>(row));
    if (rows <= 0) return;
    const int columns = std::min(group * kPanelColumns, b.n - panel * kPanelColumns);
    const uint16_t* panel_data = b.data + static_cast<size_t>(panel) * kPanelColumns * padded;
    float* to = c + row * ldc + static_cast<size_t>(panel) * kPanelColumns;
    if (vectors) {
      const TinyIsZero tiny_is_zero;
      HWY_DYNAMIC_DISPATCH(multiply_vectors)
      (widened_.data() + row * padded, panel_data, steps, rows, columns, to, ldc, accumulate);
      return;
    }
    multiply_block(thread, {.a = rounded + row / kTile * strip_elements(b.k),
                            .b = panel_data,
                            .c = to,
                            .next_b = next_of(panel, columns),
                            .a_strip = strip_elements(b.k),
                            .ldc = ldc,
                            .rows = rows,
                            .columns = columns,
                            .steps = steps,
                            .accumulate = accumulate});
  });
}

void Bf16Scratch::multiply_block(int thread, AmxBlock block) {
  if (unit_ == Bf16Unit::kTiles) {
    block.sums = sums_[static_cast<size_t>(thread)].data();
    return multiply_tiles(block);
  }
  const TinyIsZero tiny_is_zero;
  multiply_dots(block);
}

void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
               const TiledB& b, float* c, size_t ldc, bool accumulate) {
  const bool serial = pool.size() == 1 || int64_t{m} * b.n * b.k < kSerialOperations;
  scratch.round(pool, m, a, lda, b.k, serial);
  scratch.multiply(pool, scratch.rounded_.data(), m, b, c, ldc, accumulate, serial);
}

void feed_forward_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
                       const TiledB& gate_up, const TiledB& down, float* c, size_t ldc) {
  constexpr int kColumns = 2 * kPanelColumns;  // of a block
  const int unit_rows = rows_gated(scratch.unit_);
  const bool serial = pool.size() == 1 || int64_t{m} * gate_up.n * gate_up.k < kSerialOperations;
  scratch.round(pool, m, a, lda, gate_up.k, serial);
  const int hidden = down.k, steps = steps_of(gate_up.k);
  const size_t panel = static_cast<size_t>(steps) * kStep * kPanelColumns;
  // A task's columns of gate and up stay in L2 while its rows pass by.
  const int group = std::clamp(hidden / (4 * pool.size()) / kColumns, 1, kBlockPanels / 2);
  const int blocks = (hidden + kColumns - 1) / kColumns, groups = (blocks + group - 1) / group;
  for_tasks(pool, serial, groups, [&](int64_t task, int thread) {
    float* gate = scratch.gated_[static_cast<size_t>(thread)].data();
    float* up = gate + unit_rows * kColumns;
    const int end = std::min(blocks, static_cast<int>(task + 1) * group);
    const int row_blocks = (m + unit_rows - 1) / unit_rows;
    const int ahead =
        (serial ? 1 : pool.size()) * group * kColumns;  // to this thread's next columns
    for (int row = 0; row < m; row += unit_rows) {
      const int rows = std::min(unit_rows, m - row);
      for (int block = static_cast<int>(task) * group; block < end; ++block) {
        const int column = block * kColumns, columns = std::min(kColumns, hidden - column);
        const auto multiply = [&](int first, float* to) {
          const uint16_t* b = gate_up.data + static_cast<size_t>(first / kPanelColumns) * panel;
          scratch.multiply_block(
              thread,
              {.a = scratch.rounded_.data() +
                    static_cast<size_t>(row / kTile) * strip_elements(gate_up.k),
               .b = b,
               .c = to,
               .next_b =
                   column + ahead + columns <= hidden ? b + ahead / kPanelColumns * panel : nullptr,
               .next_part = row / unit_rows,
               .next_parts = row_blocks,
               .a_strip = strip_elements(gate_up.k),
               .ldc = kColumns,
               .rows = rows,
               .columns = columns,
               .steps = steps,
               .accumulate = false});
        };
        multiply(column, gate);
        multiply(hidden + column, up);
        uint16_t* lines = scratch.hidden_.data() +
                          static_cast<size_t>(row / kTile) * strip_elements(hidden) +
                          static_cast<size_t>(column / kStep) * kStep * kTile;
        HWY_DYNAMIC_DISPATCH(gate_into_tiles)
        (gate, up, kColumns, rows, columns, lines, strip_elements(hidden));
        for (int first = 0; scratch.unit_ == Bf16Unit::kDots && first < rows; first += kTile) {
          pair_for_dots(lines + static_cast<size_t>(first / kTile) * strip_elements(hidden),
                        columns / kStep, std::min(kTile, rows - first));
        }
      }
    }
  });
  scratch.multiply(pool, scratch.hidden_.data(), m, down, c, ldc, true, serial);
}

}  // namespace baton::engine
#endif  // HWY_ONCE
