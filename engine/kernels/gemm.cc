// gemm: packing and register-tiled kernels for every vector width, chosen at run time.
#include "engine/kernels/gemm.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/gemm.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F = hn::ScalableTag<float>;
constexpr size_t kLanes = hn::MaxLanes(F());
// 32 vector registers hold 14 x 2 sums, two of B and a broadcast; 16 hold 6 x 2.
constexpr int kTileRows = HWY_MAX_BYTES >= 64 ? 14 : 6;
constexpr size_t kSliverStride = HWY_MAX_BYTES >= 64 ? 16 : 8;
constexpr size_t kPassColumns = 2 * kLanes;
static_assert(kBlockM % kTileRows == 0 &&
              kBlockM / kTileRows * kSliverStride * kBlockK <= kScratchA);
// Every piece of k costs a pass over C. Where C is in no cache of the thread's, pieces are longer
// (of A they have fewer rows then) and alike; sums are the same chains.
constexpr int kLongestK = 576;
constexpr size_t kCachedC = size_t{2} << 20;
constexpr int kRowUnit = 42;  // of 14 rows or 6
static_assert(kRowUnit % kTileRows == 0 && kBlockM % kRowUnit == 0);

constexpr int piece_of(int k, size_t c_bytes) {
  if (c_bytes <= kCachedC) return kBlockK;
  const int pieces = (k + kLongestK - 1) / kLongestK;
  return ((k + pieces - 1) / pieces + 7) / 8 * 8;
}
constexpr int rows_of(int piece) {
  return piece <= kBlockK ? kBlockM : kBlockM * kBlockK / piece / kRowUnit * kRowUnit;
}
static_assert(rows_of(kLongestK) >= 3 * kRowUnit);

BATON_INLINE hn::Vec<F> load_b(const float* b) { return hn::LoadU(F(), b); }
BATON_INLINE hn::Vec<F> load_b(const uint16_t* b) {
  const hn::Rebind<uint16_t, F> half;
  const hn::Rebind<uint32_t, F> word;
  return hn::BitCast(F(), hn::ShiftLeft<16>(hn::PromoteTo(word, hn::LoadU(half, b))));
}

// A single row reads B from memory once: what is needed so many rows of k later is asked for, in
// each panel, a line at a time.
constexpr int kRowsAhead = 32;

// kRows x (kPanels * 2 vectors) of C over k rows of packed A [k][kSliverStride] and B [k][32].
// C is read and written through `c`, whose rows and columns must all exist.
template <int kRows, int kPanels, typename TB>
BATON_INLINE void tile(const float* HWY_RESTRICT a, const TB* HWY_RESTRICT b, size_t panel_step,
                       int k, float* HWY_RESTRICT c, size_t ldc, bool load_c) {
  const F f;
  constexpr int kVectors = 2 * kPanels;
  hn::Vec<F> sum[kRows][kVectors];
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const size_t column = (v / 2) * kPanelColumns + (v % 2) * kLanes;
      sum[r][v] = load_c ? hn::LoadU(f, c + r * ldc + column) : hn::Zero(f);
    }
  }
  for (int i = 0; i < k; ++i) {
    hn::Vec<F> row[kVectors];
    if constexpr (kPanels > 1) {
      BATON_UNROLL
      for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(b + p * panel_step + kRowsAhead * kPanelColumns, 0, 2);
      }
    }
    BATON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      row[v] = load_b(b + (v / 2) * panel_step + (v % 2) * kLanes);
    }
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto factor = hn::Set(f, a[r]);
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(factor, row[v], sum[r][v]);
    }
    a += kSliverStride;
    b += kPanelColumns;
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const size_t column = (v / 2) * kPanelColumns + (v % 2) * kLanes;
      hn::StoreU(sum[r][v], f, c + r * ldc + column);
    }
  }
}

// One sliver of rows times `kPanels` panels; at the edges of C it works on a copy.
template <int kRows, int kPanels, typename TB>
HWY_NOINLINE void sliver(const float* a, const TB* b, size_t panel_step, int k, float* c,
                         size_t ldc, int rows, int columns, bool load_c) {
  constexpr int kColumns = kPanels * kPanelColumns;
  HWY_ALIGN float copy[kRows * kColumns];
  float* target = c;
  size_t target_ld = ldc;
  const bool edge = rows < kRows || columns < kColumns;
  if (edge) {
    target = copy;
    target_ld = kColumns;
    if (load_c) {
      for (int r = 0; r < rows; ++r) std::copy_n(c + r * ldc, columns, copy + r * kColumns);
    }
  }
  for (size_t pass = 0; pass < kPanelColumns; pass += kPassColumns) {
    tile<kRows, kPanels, TB>(a, b + pass, panel_step, k, target + pass, target_ld, load_c);
  }
  if (edge) {
    for (int r = 0; r < rows; ++r) std::copy_n(copy + r * kColumns, columns, c + r * ldc);
  }
}

template <typename TB>
void sliver_by_rows(const float* a, const TB* b, int k, float* c, size_t ldc, int rows, int columns,
                    bool load_c) {
  if constexpr (kTileRows == 14) {
    if (rows > 8) {
      return sliver<14, 1, TB>(a, b, 0, k, c, ldc, rows, columns, load_c);
    }
  }
  if (rows > 4) {
    return sliver<std::min(kTileRows, 8), 1, TB>(a, b, 0, k, c, ldc, rows, columns, load_c);
  }
  if (rows > 2) return sliver<4, 1, TB>(a, b, 0, k, c, ldc, rows, columns, load_c);
  if (rows > 1) return sliver<2, 1, TB>(a, b, 0, k, c, ldc, rows, columns, load_c);
  return sliver<1, 1, TB>(a, b, 0, k, c, ldc, rows, columns, load_c);
}

// Packs `rows` x `k` of A into slivers [ceil(rows / kTileRows)][k][kSliverStride].
void pack_a(const MatrixView& a, int rows, int k, float* HWY_RESTRICT out) {
  for (int r0 = 0; r0 < rows; r0 += kTileRows) {
    const int height = std::min(kTileRows, rows - r0);
    const float* source = a.data + static_cast<size_t>(r0) * a.row_stride;
    if (a.row_stride == 1) {
      for (int i = 0; i < k; ++i) {
        const float* column = source + static_cast<size_t>(i) * a.col_stride;
        float* to = out + static_cast<size_t>(i) * kSliverStride;
        int r = 0;
        if (height == kTileRows) {
          BATON_UNROLL
          for (r = 0; r < kTileRows; ++r) to[r] = column[r];
        } else {
          for (; r < height; ++r) to[r] = column[r];
          for (; r < kTileRows; ++r) to[r] = 0.0f;
        }
      }
    } else {
      int i = 0;
#if HWY_TARGET != HWY_SCALAR
      const hn::FixedTag<float, 4> quad;
      if (a.col_stride == 1) {
        for (; i + 4 <= k; i += 4) {
          for (size_t g = 0; g < kSliverStride; g += 4) {
            hn::Vec<decltype(quad)> in[4];
            BATON_UNROLL
            for (size_t r = 0; r < 4; ++r) {
              in[r] = static_cast<int>(g + r) < height
                          ? hn::LoadU(quad, source + (g + r) * a.row_stride + i)
                          : hn::Zero(quad);
            }
            const auto low01 = hn::InterleaveLower(quad, in[0], in[1]);
            const auto low23 = hn::InterleaveLower(quad, in[2], in[3]);
            const auto high01 = hn::InterleaveUpper(quad, in[0], in[1]);
            const auto high23 = hn::InterleaveUpper(quad, in[2], in[3]);
            float* to = out + static_cast<size_t>(i) * kSliverStride + g;
            hn::StoreU(hn::ConcatLowerLower(quad, low23, low01), quad, to);
            hn::StoreU(hn::ConcatUpperUpper(quad, low23, low01), quad, to + kSliverStride);
            hn::StoreU(hn::ConcatLowerLower(quad, high23, high01), quad, to + 2 * kSliverStride);
            hn::StoreU(hn::ConcatUpperUpper(quad, high23, high01), quad, to + 3 * kSliverStride);
          }
        }
      }
#endif
      for (; i < k; ++i) {
        for (int r = 0; r < kTileRows; ++r) {
          out[i * kSliverStride + r] =
              r < height ? source[r * a.row_stride + i * a.col_stride] : 0.0f;
        }
      }
    }
    out += static_cast<size_t>(k) * kSliverStride;
  }
}

template <typename TB>
void unpack_panel(const TB* from, int k, float* HWY_RESTRICT to) {
  const F f;
  for (size_t i = 0; i < static_cast<size_t>(k) * kPanelColumns; i += kLanes) {
    hn::Store(load_b(from + i), f, to + i);
  }
}

// Rows [0, m) of C times panels [panel0, panel1): k is blocked, A is packed once per block, and
// narrow panels are widened once per block when enough rows use them.
template <typename TB>
void block_of(int m, const MatrixView& a, const PackedB& b, const TB* data, int panel0, int panel1,
              float* c, size_t ldc, bool accumulate, float* a_scratch, float* b_scratch) {
  constexpr bool kNarrow = sizeof(TB) < sizeof(float);
  const size_t step = b.panel_rows * kPanelColumns;
  const size_t c_bytes =
      static_cast<size_t>(m) * static_cast<size_t>(panel1 - panel0) * kPanelColumns * sizeof(float);
  const int piece = piece_of(b.k, c_bytes);
  const int block_rows = rows_of(piece);
  for (int k0 = 0; k0 < b.k; k0 += piece) {
    const int k = std::min(piece, b.k - k0);
    const bool load_c = accumulate || k0 > 0;
    const MatrixView a_block{a.data + static_cast<size_t>(k0) * a.col_stride, a.row_stride,
                             a.col_stride};
    const auto panel_at = [&](int panel) {
      return data + static_cast<size_t>(panel) * step + static_cast<size_t>(k0) * kPanelColumns;
    };
    for (int m0 = 0; m0 < m; m0 += block_rows) {
      const int rows = std::min(block_rows, m - m0);
      pack_a({a_block.data + static_cast<size_t>(m0) * a.row_stride, a.row_stride, a.col_stride},
             rows, k, a_scratch);
      int panel = panel0;
      // A single row has too few chains to fill the pipelines: four panels at a time.
      for (; kNarrow && rows == 1 && panel + 4 <= panel1; panel += 4) {
        sliver<1, 4, TB>(a_scratch, panel_at(panel), step, k,
                         c + static_cast<size_t>(m0) * ldc + panel * kPanelColumns, ldc, 1,
                         std::min(4 * kPanelColumns, b.n - panel * kPanelColumns), load_c);
      }
      for (; panel < panel1; ++panel) {
        const int columns = std::min(kPanelColumns, b.n - panel * kPanelColumns);
        const bool widened = kNarrow && rows > 2 * kTileRows;
        if (widened) unpack_panel(panel_at(panel), k, b_scratch);
        for (int r = 0; r < rows; r += kTileRows) {
          const float* a_sliver =
              a_scratch + static_cast<size_t>(r / kTileRows) * k * kSliverStride;
          float* c_tile = c + static_cast<size_t>(m0 + r) * ldc + panel * kPanelColumns;
          const int height = std::min(kTileRows, rows - r);
          if (widened) {
            sliver_by_rows(a_sliver, b_scratch, k, c_tile, ldc, height, columns, load_c);
          } else {
            sliver_by_rows(a_sliver, panel_at(panel), k, c_tile, ldc, height, columns, load_c);
          }
        }
      }
    }
  }
}

void block(int m, const MatrixView& a, const PackedB& b, int panel0, int panel1, float* c,
           size_t ldc, bool accumulate, float* a_scratch, float* b_scratch) {
  const auto of = [&](const auto* data) {
    block_of(m, a, b, data, panel0, panel1, c, ldc, accumulate, a_scratch, b_scratch);
  };
  if (b.bf16 != nullptr) return of(b.bf16);
  of(b.f32);
}

int tile_rows() { return kTileRows; }

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(block);
HWY_EXPORT(tile_rows);

namespace {

// Products smaller than this are not worth waking a second thread for.
constexpr int64_t kSerialOperations = 200'000;

}  // namespace

GemmScratch::GemmScratch(int threads) {
  for (int i = 0; i < threads; ++i) {
    buffers_.emplace_back(kScratchA + size_t{HWY_NAMESPACE::kLongestK} * kPanelColumns);
  }
}

float* GemmScratch::b(int thread) { return a(thread) + kScratchA; }

size_t GemmScratch::bytes() const {
  return buffers_.empty() ? 0 : buffers_.size() * buffers_[0].size() * sizeof(float);
}

void gemm_serial(GemmScratch& scratch, int thread, int m, const MatrixView& a, const PackedB& b,
                 float* c, size_t ldc, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(block)
  (m, a, b, 0, panels_of(b.n), c, ldc, accumulate, scratch.a(thread), scratch.b(thread));
}

void gemm(ComputePool& pool, GemmScratch& scratch, int m, const MatrixView& a, const PackedB& b,
          float* c, size_t ldc, bool accumulate) {
  const int threads = pool.size();
  if (threads == 1 || int64_t{m} * b.n * b.k < kSerialOperations) {
    return gemm_serial(scratch, 0, m, a, b, c, ldc, accumulate);
  }
  const int tile = HWY_DYNAMIC_DISPATCH(tile_rows)();
  if (m >= 2 * tile * threads) {
    // Rows: each task packs its own slice of A. A few tasks per thread even out stolen time.
    const int slices = threads * std::clamp(m / (threads * kBlockM), 1, 8);
    const int slivers = (m + tile - 1) / tile;
    const int rows = (slivers + slices - 1) / slices * tile;
    pool.parallel_for((m + rows - 1) / rows, [&](int64_t task, int thread) {
      const size_t row = static_cast<size_t>(task) * static_cast<size_t>(rows);
      const int height = std::min(rows, m - static_cast<int>(row));
      HWY_DYNAMIC_DISPATCH(block)
      (height, {a.data + row * a.row_stride, a.row_stride, a.col_stride}, b, 0, panels_of(b.n),
       c + row * ldc, ldc, accumulate, scratch.a(thread), scratch.b(thread));
    });
    return;
  }
  // Columns, in groups of four panels.
  const int panels = panels_of(b.n);
  const int group = std::max(4, (panels / (4 * threads)) & ~3);
  pool.parallel_for((panels + group - 1) / group, [&](int64_t task, int thread) {
    const int first = static_cast<int>(task) * group;
    HWY_DYNAMIC_DISPATCH(block)
    (m, a, b, first, std::min(panels, first + group), c, ldc, accumulate, scratch.a(thread),
     scratch.b(thread));
  });
}

}  // namespace baton::engine
#endif  // HWY_ONCE
