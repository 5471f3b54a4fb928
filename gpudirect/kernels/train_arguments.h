// The arguments of the kernels of a training step. Each kernel's results equal those of the
// trainer's CPU code bit by bit (engine/train/backward): all sums are added in the same order.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define BATON_ANYWHERE __host__ __device__ constexpr
#else
#define BATON_ANYWHERE constexpr
#endif

namespace baton::gpudirect::kernels {

// Tiles of so many rows and columns that a matrix [m][n] has.
BATON_ANYWHERE uint64_t tiles_of(uint32_t m, uint32_t rows, uint32_t n, uint32_t columns) {
  return uint64_t{(m + rows - 1) / rows} * ((n + columns - 1) / columns);
}
// Relative costs of a tile when about 128 tiles share the device's multiprocessors; measured with
// fp32 sums.
inline constexpr uint64_t kLargeTile = 16, kMiddleTile = 5, kSmallTile = 3;
BATON_ANYWHERE uint64_t cost_of(uint64_t tiles, uint64_t each) {
  return (tiles + 127) / 128 * each;
}

// The kernels of BATON_KERNELS (arguments.h) that only training needs.
#define BATON_TRAIN_KERNELS(F)                   \
  F(gemm_f32, GemmF32, 256)                      \
  F(rms_norm_back, RmsNormBack, 256)             \
  F(rms_norm_weights, RmsNormWeights, 256)       \
  F(rope_rows, RopeRows, 256)                    \
  F(causal_softmax, CausalSoftmax, 256)          \
  F(causal_softmax_back, CausalSoftmaxBack, 256) \
  F(swiglu_back, SwiGluBack, 256)                \
  F(classifier, Classifier, 256)                 \
  F(add_rows, AddRows, 256)                      \
  F(sum_squares, SumSquares, 256)

// Products of fp32 matrices, `outer` times `inner` of them, each at its own place:
// c [m][n] = start + a [m][k] b [k][n]. Each of a and b may lie transposed: a(i, l) is
// a[i * a_row + l * a_k], b(l, j) is b[l * b_k + j * b_column], and one of each pair is 1. Every
// element is one chain c = fma(a, b, c) in ascending k, from `start` or from zero: the engine's
// gemm() on packed fp32.
//
// Attention is causal, and skips what it does not see by blocks of kCausalRows rows of c or of k,
// as the CPU does.
inline constexpr uint32_t kCausalRows = 64;
enum class Causal : uint32_t {
  kNone,
  kBelow,  // of c only columns before the end of their rows' block
  kUntil,  // only k before the end of the rows' block
  kFrom,   // only k from the beginning of the rows' block on
};
struct GemmF32 {
  const float* a = nullptr;
  const float* b = nullptr;
  const float* start = nullptr;  // laid out as c, and c itself maybe; null: zero
  float* c = nullptr;
  uint32_t m = 0;
  uint32_t n = 0;
  uint32_t k = 0;
  uint32_t a_row = 0;
  uint32_t a_k = 1;
  uint32_t b_k = 1;
  uint32_t b_column = 0;
  uint32_t ldc = 0;  // elements from row to row
  uint32_t outer = 1;
  uint32_t inner = 1;
  uint64_t a_outer = 0;  // elements from matrix to matrix
  uint64_t a_inner = 0;
  uint64_t b_outer = 0;
  uint64_t b_inner = 0;
  uint64_t c_outer = 0;
  uint64_t c_inner = 0;
  Causal causal = Causal::kNone;
};
// How large the tiles are that blocks share out between them, which no sum depends on.
enum class F32Tile : uint32_t {
  kLarge,   // 128 x 128
  kMiddle,  // 64 x 64
  kSmall,   // 64 x 32
};
BATON_ANYWHERE uint64_t f32_tiles_of(const GemmF32& a, uint32_t rows, uint32_t columns) {
  return tiles_of(a.m, rows, a.n, columns) * a.outer * a.inner;
}
BATON_ANYWHERE F32Tile f32_tile(const GemmF32& a) {
  const uint64_t large = cost_of(f32_tiles_of(a, 128, 128), kLargeTile);
  const uint64_t middle = cost_of(f32_tiles_of(a, 64, 64), kMiddleTile);
  const uint64_t small = cost_of(f32_tiles_of(a, 64, 32), kSmallTile);
  if (a.causal == Causal::kNone && large <= middle && large <= small) return F32Tile::kLarge;
  return middle <= small ? F32Tile::kMiddle : F32Tile::kSmall;
}
constexpr uint64_t gemm_f32_blocks(const GemmF32& a) {
  const F32Tile tile = f32_tile(a);
  const uint32_t rows = tile == F32Tile::kLarge ? 128 : 64;
  const uint32_t columns = tile == F32Tile::kLarge ? 128 : tile == F32Tile::kMiddle ? 64 : 32;
  return f32_tiles_of(a, rows, columns);
}

// What rms_norm's gradient makes of that of y. dx += in any case, unless it is `fresh`.
struct RmsNormBack {
  const float* x = nullptr;        // [rows][size]
  const float* weight = nullptr;   // [size]
  const float* dy = nullptr;       // [rows][size]
  const float* factors = nullptr;  // [rows], that rms_norm wrote
  float* dx = nullptr;             // [rows][size]
  uint32_t rows = 0;
  uint32_t size = 0;  // a multiple of 16
  uint32_t fresh = 0;
};
// And the gradient of its weight: the sums of sixteen equal shares of the rows, one after another.
struct RmsNormWeights {
  const float* x = nullptr;
  const float* dy = nullptr;
  const float* factors = nullptr;
  float* dw = nullptr;  // [size]
  uint32_t rows = 0;
  uint32_t size = 0;
};

// Rotates the first heads of each row in place, or back; element i with i + head_dim / 2. Row r is
// at position r % length.
struct RopeRows {
  float* x = nullptr;
  const float* cos = nullptr;  // [length][head_dim / 2]
  const float* sin = nullptr;
  uint32_t rows = 0;
  uint32_t heads = 0;
  uint32_t head_dim = 0;
  uint32_t stride = 0;  // elements from row to row
  uint32_t length = 0;
  float direction = 1;
};

// Scores to probabilities in place, each row of those that it sees: softmax(scores * scaling). What
// is behind its block of kCausalRows is left alone. `length` is a multiple of 16.
struct CausalSoftmax {
  float* scores = nullptr;  // [matrices][length][length]
  uint32_t matrices = 0;
  uint32_t length = 0;
  float scaling = 1;
};
// Gradients of probabilities to those of scores, in place.
struct CausalSoftmaxBack {
  const float* weights = nullptr;  // [matrices][length][length], the probabilities
  float* gradients = nullptr;      // the same
  uint32_t matrices = 0;
  uint32_t length = 0;
  float scaling = 1;
};

struct SwiGluBack {
  const float* gate_up = nullptr;  // [rows][2 * size]: the gate, then up
  const float* d_out = nullptr;    // [rows][size]
  float* d_gate_up = nullptr;      // as gate_up
  uint32_t rows = 0;
  uint32_t size = 0;
};

// Rows of logits to the gradient of their loss, scale * (softmax - onehot(target)), in place. The
// loss of a row is log(sums) - margins. Up to kClassifierRow logits a row is read and written once.
inline constexpr uint32_t kClassifierRow = 8192;
struct Classifier {
  float* logits = nullptr;            // [rows][size], aligned to 16 bytes
  const uint32_t* targets = nullptr;  // [rows]
  float* sums = nullptr;              // [rows], of e^(logit - largest)
  float* margins = nullptr;           // [rows], the target's logit less the largest
  uint32_t rows = 0;
  uint32_t size = 0;  // a multiple of 16
  float scale = 1;
};

// table[r] += the rows of `from` that are its own, in their order: the gradient of an embedding.
// Those of r are order[begins[r]] ... order[begins[r + 1] - 1].
struct AddRows {
  float* table = nullptr;  // [count][size]
  const float* from = nullptr;
  const uint32_t* begins = nullptr;  // [count + 1]
  const uint32_t* order = nullptr;
  uint32_t count = 0;
  uint32_t size = 0;
  uint32_t fresh = 0;  // the table was nothing: it is zero where no row is added
};

// The sum of (value / divisor)^2 of every kSquaresBlock values, in f64: eight sums side by side,
// added in order.
inline constexpr uint32_t kSquaresBlock = 1024;
struct SumSquares {
  const float* values = nullptr;
  double* squares = nullptr;  // one for each block, the last of which may be shorter
  uint64_t count = 0;
  float divisor = 1;
};

}  // namespace baton::gpudirect::kernels
