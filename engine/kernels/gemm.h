// Matrix products in fp32: the one kernel behind inference and training.
// Weights are fp32 or bf16.
//
// Every element of C is one chain of fused multiply-adds, c = fma(a[k], b[k], c), in ascending k,
// started from zero (or from C when accumulating). Blocking, threads, the number of rows and the
// vector width do not change the chain, so results are the same to the bit for any batch size.
// The scheme (packed slivers of A, 32-column panels of B, k blocked to fit the caches) is the one
// of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"

namespace baton::engine {

inline constexpr int kPanelColumns = 32;

// A read-only matrix anywhere in memory: element (i, j) is data[i * row_stride + j * col_stride].
struct MatrixView {
  const float* data = nullptr;
  size_t row_stride = 0;
  size_t col_stride = 1;
  MatrixView transposed() const { return {data, col_stride, row_stride}; }
};

// B of C = A B, stored in panels of 32 columns: [ceil(n / 32)][k][32], columns past n are zero.
// One of f32 and bf16 is there.
struct PackedB {
  int k = 0;
  int n = 0;
  const float* f32 = nullptr;
  const uint16_t* bf16 = nullptr;
  // Rows between panels; at least k. A product may use fewer rows than were packed.
  size_t panel_rows = 0;
};

constexpr int panels_of(int n) { return (n + kPanelColumns - 1) / kPanelColumns; }

size_t packed_elements(int k, int n);

// Cache blocking: a slab of kBlockM x kBlockK of A stays in L2, a panel of B in L1 or L2.
inline constexpr int kBlockM = 252;
inline constexpr int kBlockK = 384;
inline constexpr size_t kScratchA = size_t{kBlockM} / 6 * 8 * kBlockK;

// Scratch of one thread inside a product; fixed size.
class GemmScratch {
 public:
  explicit GemmScratch(int threads);
  float* a(int thread) { return buffers_[static_cast<size_t>(thread)].data(); }
  float* b(int thread);
  size_t bytes() const;

 private:
  std::vector<AlignedArray<float>> buffers_;
};

// Packs B [k][n] (fp32, any strides) into `out` (packed_elements(k, n) floats).
void pack_b(ComputePool& pool, int k, int n, const MatrixView& b, float* out);
void pack_b_serial(int k, int n, const MatrixView& b, float* out);
// Packs rows of a Hugging Face weight [n][k] (bf16) as B = W^T; `out` has packed_elements(k, n).
void pack_weight(int k, int n, const uint16_t* weight, uint16_t* out);

// C [m][n] (row stride ldc) = A [m][k] B, or += when `accumulate`.
void gemm(ComputePool& pool, GemmScratch& scratch, int m, const MatrixView& a, const PackedB& b,
          float* c, size_t ldc, bool accumulate);
// The same on the calling thread, with the scratch of `thread`.
void gemm_serial(GemmScratch& scratch, int thread, int m, const MatrixView& a, const PackedB& b,
                 float* c, size_t ldc, bool accumulate);

}  // namespace baton::engine
