// How B of a product is stored.
#include <algorithm>

#include "engine/kernels/gemm.h"

namespace baton::engine {
namespace {

void pack_panel(int k, int n, const MatrixView& b, int panel, float* out) {
  const int columns = std::min(kPanelColumns, n - panel * kPanelColumns);
  const float* source = b.data + static_cast<size_t>(panel) * kPanelColumns * b.col_stride;
  float* to = out + static_cast<size_t>(panel) * k * kPanelColumns;
  for (int i = 0; i < k; ++i) {
    const float* row = source + static_cast<size_t>(i) * b.row_stride;
    float* line = to + static_cast<size_t>(i) * kPanelColumns;
    if (b.col_stride == 1) {
      std::copy_n(row, columns, line);
    } else {
      for (int j = 0; j < columns; ++j) line[j] = row[static_cast<size_t>(j) * b.col_stride];
    }
    std::fill(line + columns, line + kPanelColumns, 0.0f);
  }
}

}  // namespace

size_t packed_elements(int k, int n) {
  return static_cast<size_t>(panels_of(n)) * kPanelColumns * static_cast<size_t>(k);
}

void pack_b_serial(int k, int n, const MatrixView& b, float* out) {
  for (int panel = 0; panel < panels_of(n); ++panel) pack_panel(k, n, b, panel, out);
}

void pack_b(ComputePool& pool, int k, int n, const MatrixView& b, float* out) {
  pool.parallel_for(panels_of(n),
                    [&](int64_t panel, int) { pack_panel(k, n, b, static_cast<int>(panel), out); });
}

void pack_weight(int k, int n, const uint16_t* weight, uint16_t* out) {
  for (int panel = 0; panel < panels_of(n); ++panel) {
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < kPanelColumns; ++j) {
        const int column = panel * kPanelColumns + j;
        *out++ = column < n ? weight[static_cast<size_t>(column) * k + i] : uint16_t{0};
      }
    }
  }
}

}  // namespace baton::engine
