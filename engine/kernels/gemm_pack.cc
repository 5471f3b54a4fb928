// How B of a product is stored, and what rounding it takes.
#include <algorithm>
#include <cmath>
#include <limits>

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

void quantise_weight(int k, int n, const uint16_t* weight, int8_t* out, float* scales) {
  const size_t blocks = scale_blocks(static_cast<size_t>(k));
  for (int column = 0; column < panels_of(n) * kPanelColumns; ++column) {
    const size_t panel = static_cast<size_t>(column / kPanelColumns);
    const size_t lane = static_cast<size_t>(column % kPanelColumns);
    int8_t* to = out + panel * static_cast<size_t>(k) * kPanelColumns + lane;
    float* scale = scales + panel * blocks * kPanelColumns + lane;
    for (int begin = 0; begin < k; begin += kBlockK, scale += kPanelColumns) {
      const int end = std::min(k, begin + kBlockK);
      const auto value = [&](int i) {
        return column < n ? float_from_bf16(weight[static_cast<size_t>(column) * k + i]) : 0.0f;
      };
      float largest = 0;
      bool finite = true;
      for (int i = begin; i < end; ++i) {
        finite &= std::isfinite(value(i));
        largest = std::max(largest, std::fabs(value(i)));
      }
      *scale = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
      for (int i = begin; i < end; ++i, to += kPanelColumns) {
        const float steps = *scale > 0 ? std::nearbyint(value(i) / *scale) : 0.0f;
        *to = static_cast<int8_t>(std::clamp(steps, -127.0f, 127.0f));
      }
    }
  }
}

}  // namespace baton::engine
