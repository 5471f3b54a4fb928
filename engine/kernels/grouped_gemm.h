// Several matrix products at once, of which one alone would not keep all threads busy: experts,
// each with a few rows.
#pragma once

#include <cstddef>
#include <span>

#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"

namespace baton::engine {

// C [m][n] (row stride ldc) = A [m][k] (row stride lda) B. No C overlaps another.
struct GroupedProduct {
  int m = 0;
  const float* a = nullptr;
  size_t lda = 0;
  PackedB b;  // k and n are the same in all
  float* c = nullptr;
  size_t ldc = 0;
};

// Each element is the chain that gemm() makes of it.
void gemm_grouped(ComputePool& pool, GemmScratch& scratch,
                  std::span<const GroupedProduct> products);

}  // namespace baton::engine
