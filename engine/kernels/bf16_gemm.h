// Matrix products with bf16 on both sides and sums in fp32: the arithmetic of tile units.
//
// Every element of C is one chain. A is rounded to bf16 (to nearest, ties to even) and k is padded
// with zeros to whole steps of 32. A step makes two sums from zero, of the products of its even and
// of its odd k, each c = fma(a[k], b[k], c) in ascending k; the two are added, and that is added to
// C. Numbers below the smallest normal one count as zero wherever they are read or made. This is
// what Intel's AMX computes, to the bit; vdpbf16ps and fp32 vectors compute the same without it. So
// results depend neither on the processor nor on the batch, but they differ from those of gemm.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/amx.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/gemm.h"

namespace baton::engine {

// kTiles: engine/kernels/amx.h. kDots: engine/kernels/bf16_dot.h. kVectors: fp32, everywhere.
enum class Bf16Unit { kVectors, kTiles, kDots };

bool usable(Bf16Unit unit);
// Tiles where they can be used, else dots, else vectors.
Bf16Unit best_bf16_unit();
const char* unit_name(Bf16Unit unit);  // for people

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

// Holds the rounded A of one product at a time: max_rows x max_k, in fp32 for vectors, else in
// bf16; and the sums of each thread that tiles make. With `max_hidden`, but not for vectors, also
// what feed_forward_bf16() has between its products: max_rows x max_hidden.
class Bf16Scratch {
 public:
  Bf16Scratch() = default;
  Bf16Scratch(Bf16Unit unit, int max_rows, int max_k, int threads, int max_hidden = 0);
  Bf16Unit unit() const { return unit_; }
  size_t bytes() const;
  // True if feed_forward_bf16() can use this scratch for `hidden`.
  bool takes_hidden(int hidden) const;

 private:
  friend void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
                        const TiledB& b, float* c, size_t ldc, bool accumulate);
  friend void feed_forward_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a,
                                size_t lda, const TiledB& gate_up, const TiledB& down, float* c,
                                size_t ldc);
  // Rounds A into rounded_, or widened_.
  void round(ComputePool& pool, int m, const float* a, size_t lda, int k, bool serial);
  // C = A B of an A that is there, or in hidden_.
  void multiply(ComputePool& pool, const uint16_t* tiles, int m, const TiledB& b, float* c,
                size_t ldc, bool accumulate, bool serial);

  // By tiles or dots; `sums` is set here.
  void multiply_block(int thread, AmxBlock block);

  Bf16Unit unit_ = Bf16Unit::kVectors;
  int max_hidden_ = 0;
  AlignedArray<uint16_t> rounded_;
  AlignedArray<uint16_t> hidden_;
  AlignedArray<float> widened_;
  std::vector<AlignedArray<float>> sums_;
  std::vector<AlignedArray<float>> gated_;  // of each thread: a block of gate, and one of up
};

// From a strip of 16 rows of a rounded A to the next, in elements: an odd number of tiles, so that
// strips whose k is a power of two do not push each other out of the caches.
inline size_t strip_elements(int k) { return static_cast<size_t>(((k + 31) / 32) | 1) * 512; }

// C [m][n] (row stride ldc) = A [m][k] (row stride lda) B, or += when `accumulate`. m and b.k fit
// into the scratch.
void gemm_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
               const TiledB& b, float* c, size_t ldc, bool accumulate);

// C [m][down.n] += swiglu(A gate_up) down, where the columns of gate_up are the gate's, then as
// many of up. The same chains as gemm_bf16(), swiglu() (elementwise.h) and gemm_bf16() one after
// the other, but what is between them is rounded and put into tiles where it is made, and never
// leaves the caches. Needs scratch.takes_hidden(down.k).
void feed_forward_bf16(ComputePool& pool, Bf16Scratch& scratch, int m, const float* a, size_t lda,
                       const TiledB& gate_up, const TiledB& down, float* c, size_t ldc);

}  // namespace baton::engine
