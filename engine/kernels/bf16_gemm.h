// Matrix products with bf16 on both sides and sums in fp32: the arithmetic of tile units.
//
// Every element of C is one chain. A is rounded to bf16 (to nearest, ties to even) and k is padded
// with zeros to whole steps of 32. A step makes two sums from zero, of the products of its even and
// of its odd k, each c = fma(a[k], b[k], c) in ascending k; the two are added, and that is added to
// C. Numbers below the smallest normal one count as zero wherever they are read or made. This is
// what Intel's AMX computes, to the bit; the vector kernels compute the same without it. So results
// depend neither on the processor nor on the batch, but they differ from those of gemm.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"

namespace baton::engine {

enum class Bf16Unit { kVectors, kTiles };

// kTiles where engine/kernels/amx.h says that they can be used.
Bf16Unit best_bf16_unit();

// B of C = A B, in bf16: panels of 32 columns, of steps of 32 k, of two tiles of 16 columns:
// [ceil(n / 32)][ceil(k / 32)][2][16][16][2], where the last index is the lower bit of k.
struct TiledB {
  int k = 0;
  int n = 0;
  const uint16_t* data = nullptr;  // 64-byte aligned
};

size_t tiled_elements(int k, int n);
// Packs rows of a Hugging Face weight [n][k] (bf16) as B = W^T; `out` has tiled_elements(k, n).
void pack_tiles(int k, int n, const uint16_t* weight, uint16_t* out);

// Holds the rounded A of one product at a time: max_rows x max_k, in bf16 for tiles, in fp32 for
// vectors; and the sums of each thread that tiles make.
class Bf16Scratch {
 public:
  Bf16Scratch() = default;
  Bf16Scratch(Bf16Unit unit, int max_rows, int max_k, int threads);
  Bf16Unit unit() const { return unit_; }
  size_t bytes() const;

 private:
  friend void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
                        const TiledB& b, float* c, size_t ldc, bool accumulate);
  Bf16Unit unit_ = Bf16Unit::kVectors;
  AlignedArray<uint16_t> rounded_;
  AlignedArray<float> widened_;
  std::vector<AlignedArray<float>> sums_;
};

// C [m][n] (row stride ldc) = A [m][k] (row stride lda) B, or += when `accumulate`. m and b.k fit
// into the scratch.
void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
               const TiledB& b, float* c, size_t ldc, bool accumulate);

// Plain loops with the same chains, for tests; B as rows of a weight [n][k].
void reference_gemm_bf16(int m, int n, int k, const float* a, size_t lda, const uint16_t* weight,
                         float* c, size_t ldc, bool accumulate);

}  // namespace baton::engine
