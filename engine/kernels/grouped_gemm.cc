// gemm_grouped: tasks are slices of columns of single products.
#include "engine/kernels/gemm.h"

#include <algorithm>
#include <cstdint>

namespace baton::engine {
namespace {

// All products together smaller than this are not worth waking a second thread for.
constexpr int64_t kSerialOperations = 200'000;
// A task has a multiple of these, of which a single row needs four to fill the pipelines.
constexpr int kPanelsAtOnce = 4;
constexpr int kTasksPerThread = 8;

}  // namespace

void gemm_grouped(ComputePool& pool, GemmScratch& scratch,
                  std::span<const GroupedProduct> products) {
  if (products.empty()) return;
  const PackedB& shape = products[0].b;
  const int panels = panels_of(shape.n);
  int64_t rows = 0;
  for (const GroupedProduct& product : products) rows += product.m;
  const bool serial = pool.size() == 1 || rows * shape.n * shape.k < kSerialOperations;
  int group = panels;
  if (!serial) {
    const int64_t wanted = int64_t{kTasksPerThread} * pool.size();
    const int64_t fair = static_cast<int64_t>(products.size()) * panels / wanted;
    group = static_cast<int>(std::max<int64_t>(fair / kPanelsAtOnce, 1)) * kPanelsAtOnce;
  }
  const int64_t slices = (panels + group - 1) / group;
  const auto multiply = [&](int64_t task, int thread) {
    const GroupedProduct& product = products[static_cast<size_t>(task / slices)];
    const int first = static_cast<int>(task % slices) * group;
    const size_t column = static_cast<size_t>(first) * kPanelColumns;
    PackedB slice = product.b;
    if (slice.bf16 != nullptr) slice.bf16 += column * slice.panel_rows;
    if (slice.f32 != nullptr) slice.f32 += column * slice.panel_rows;
    if (slice.i8 != nullptr) slice.i8 += column * slice.panel_rows;
    if (slice.scales != nullptr) slice.scales += column * scale_blocks(slice.panel_rows);
    slice.n = std::min(group * kPanelColumns, product.b.n - static_cast<int>(column));
    gemm_serial(scratch, thread, product.m, {product.a, product.lda, 1}, slice, product.c + column,
                product.ldc, false);
  };
  const int64_t tasks = static_cast<int64_t>(products.size()) * slices;
  if (serial) {
    for (int64_t task = 0; task < tasks; ++task) multiply(task, 0);
  } else {
    pool.parallel_for(tasks, multiply);
  }
}

}  // namespace baton::engine
