// The arguments of each kernel, and the list of kernels: one text for nvcc and for the host
// compiler.
//
// Pointers are device addresses, or host memory that is registered with the driver. A kernel's
// arguments are one struct, by value. Nothing is read or written beyond what is described here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gpudirect/kernels/train_arguments.h"

namespace baton::gpudirect::kernels {

// F(name, its arguments, threads of a block)
#define BATON_KERNELS(F)                    \
  F(copy_pieces, CopyPieces, 256)           \
  F(reduce_sum, ReduceSum, 256)             \
  F(gather_rows, GatherRows, 256)           \
  F(round_rows, RoundRows, 256)             \
  F(rms_norm, RmsNorm, 256)                 \
  F(gemm, Gemm, 256)                        \
  F(gemm_few, Gemm, 128)                    \
  F(gemm_bf16, Gemm, 128)                   \
  F(gemm_bf16_few, Gemm, 128)               \
  F(rope_store, RopeStore, 128)             \
  F(attend_pages, PageAttention, 128)       \
  F(swiglu, SwiGlu, 256)                    \
  F(adamw, AdamW, 256)                      \
  BATON_TRAIN_KERNELS(F)                    \
  F(sample, Sample, 256)                    \
  F(attend_splits, SplitAttention, 64)      \
  F(attend_wide_splits, SplitAttention, 64) \
  F(join_splits, SplitAttention, 128)       \
  F(write_ticket, WriteTicket, 32)          \
  F(wait_word, WaitWord, 32)

// Bytes from one place to another. Any alignment; multiples of 16 are fast.
struct Piece {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint64_t bytes = 0;
};

// Copies pieces: gathers pages, scatters them, packs and unpacks. No two of them overlap.
inline constexpr uint32_t kChunkBytes = 2048;  // what one warp copies at a time
struct CopyPieces {
  const Piece* pieces = nullptr;
  uint32_t count = 0;
  uint32_t chunks = 0;  // kChunkBytes of the largest piece, rounded up
};

enum class Element : uint32_t { kF32, kBF16, kF16 };

// target[i] = ((sources[0][i] (+) sources[1][i]) (+) ...) / divide_by, as collectives' fold():
// 16-bit floats in fp32, rounded once; integers wrap, and are divided towards zero. NaN stays NaN,
// with whatever payload. Floats that are all aligned to 16 bytes are fast; to an element is enough.
enum class SumElement : uint32_t { kF32, kF16, kBF16, kF64, kI8, kU8, kI32, kI64 };
inline constexpr uint32_t kSumElements = 8;
enum class SumOperation : uint32_t { kSum, kProd, kMin, kMax };
inline constexpr uint32_t kMaxSources = 8;
struct ReduceSum {
  const void* sources[kMaxSources] = {};
  void* target = nullptr;  // may be one of the sources
  uint64_t count = 0;
  uint32_t source_count = 0;
  uint32_t divide_by = 1;
  SumElement element = SumElement::kF32;
  SumOperation operation = SumOperation::kSum;
};

// Rows of a table, widened to fp32: the embeddings of tokens, or rows that want logits. `size` is a
// multiple of 8; no kF16.
struct GatherRows {
  const void* table = nullptr;     // [..][size], aligned to 16 bytes
  const uint32_t* rows = nullptr;  // [count]
  float* out = nullptr;            // [count][size]
  uint32_t count = 0;
  uint32_t size = 0;
  Element element = Element::kF32;
};

// Rows rounded to bf16, to nearest, ties to even; one behind the other. `size` and `stride` are
// multiples of 8.
struct RoundRows {
  const float* from = nullptr;
  uint16_t* to = nullptr;  // [rows][size]
  uint32_t rows = 0;
  uint32_t size = 0;
  uint32_t stride = 0;  // elements from row to row of `from`
};

// y = x / sqrt(mean(x^2) + eps) * weight, row by row; `size` is a multiple of 16. The engine's
// arithmetic: sixteen sums side by side, added in order.
struct RmsNorm {
  const float* x = nullptr;
  const float* weight = nullptr;
  float* y = nullptr;
  uint32_t rows = 0;
  uint32_t size = 0;
  float eps = 0;
  float* factors = nullptr;  // [rows], on x, which a backward pass needs; null: not wanted
};
// Rows that a block has at a time, and the blocks that all rows are for. Arrays aligned to 16 bytes
// are fast, and rows of up to kHeldRow elements, which are read once.
inline constexpr uint32_t kHeldRow = 8192;
constexpr uint32_t rms_norm_rows(uint32_t size) {
  const uint32_t fit = (kHeldRow + 256) / (size + 16);
  return size > kHeldRow ? 1 : fit > 16 ? 16 : fit;
}
constexpr uint64_t rms_norm_blocks(uint32_t rows, uint32_t size) {
  return (uint64_t{rows} + rms_norm_rows(size) - 1) / rms_norm_rows(size);
}

// c [m][n] = a [m][k] w^T + bias, or += where `accumulate`; w is a weight [n][k] in bf16, as files
// have it. k and lda are multiples of 8; a, w and `rounded` are aligned to 16 bytes. Every element
// is one chain whatever m is: a row has the same bits in any batch. Up to kFewRows rows gemm_few
// and gemm_bf16_few multiply, which read the weight once; more rows gemm and gemm_bf16, in tiles.
//
// `gemm` and `gemm_few` are the engine's gemm() (engine/kernels/gemm.h) to the bit: c = fma(a[k],
// w[k], c) in ascending k. The others multiply by tensor cores, in steps of 32 k: gemm_bf16_few
// rounds a to bf16, gemm_bf16 takes what round_rows has made of it. The emulation adds in the order
// of the engine's gemm_bf16() (engine/kernels/bf16_gemm.h); in which order tensor cores add the
// products of a step NVIDIA does not say. Each of the k / 16 sums of theirs is taken to be off by
// less than 2^-19 of its largest number.
struct Gemm {
  const float* a = nullptr;
  const uint16_t* w = nullptr;
  const float* bias = nullptr;  // [n], added last; null: none
  float* c = nullptr;
  uint32_t m = 0;
  uint32_t n = 0;
  uint32_t k = 0;
  uint32_t lda = 0;  // elements from row to row
  uint32_t ldc = 0;
  uint32_t accumulate = 0;
  const uint16_t* rounded = nullptr;  // a in bf16, row behind row: of gemm_bf16
};
inline constexpr uint32_t kFewRows = 16;
// Rows and columns of c that a block computes at a time: larger tiles need fewer bytes, smaller
// ones keep a device busy with a small product. No sum depends on it.
BATON_ANYWHERE bool large_tiles(uint32_t m, uint32_t n) {
  return cost_of(tiles_of(m, 128, n, 128), kLargeTile) <=
         cost_of(tiles_of(m, 64, n, 64), kMiddleTile);
}
constexpr uint64_t gemm_blocks(uint32_t m, uint32_t n) {
  return large_tiles(m, n) ? tiles_of(m, 128, n, 128) : tiles_of(m, 64, n, 64);
}
// What waits in shared memory for a block.
inline constexpr uint32_t kExactBytes = 68 << 10;
inline constexpr uint32_t kFewBytes = 72 << 10;
inline constexpr uint32_t kFewColumns = 32;
constexpr uint64_t gemm_few_blocks(uint32_t n) {
  return (uint64_t{n} + kFewColumns - 1) / kFewColumns;
}
inline constexpr uint32_t kTensorThreads = 128;
inline constexpr uint32_t kTensorTile = 128;
inline constexpr uint32_t kTensorBytes = 96 << 10;
BATON_ANYWHERE bool large_bf16_tiles(uint32_t m, uint32_t n) {
  return tiles_of(m, kTensorTile, n, kTensorTile) >= 96;
}
constexpr uint64_t gemm_bf16_blocks(uint32_t m, uint32_t n) {
  const uint32_t side = large_bf16_tiles(m, n) ? kTensorTile : 64;
  return tiles_of(m, side, n, side);
}

// out = silu(gate) * up, row by row: the engine's swiglu(), to the bit.
struct SwiGlu {
  const float* gate_up = nullptr;  // [rows][2 * size]: the gate, then up
  float* out = nullptr;            // [rows][size]
  uint32_t rows = 0;
  uint32_t size = 0;
};

// A layer of the engine's KV cache (engine/kernels/kv_cache.h).
struct CacheLayer {
  uint16_t* base = nullptr;  // of the layer's first block
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;  // even
};
inline constexpr uint32_t kBlockTokens = 16;

// Rotates q and k in place (element i with i + head_dim / 2), then rounds k and v to bf16 and
// stores them at their token's slot: number of the block * 16 + place in it.
struct RopeStore {
  float* q = nullptr;          // [tokens][heads][head_dim], or null
  float* k = nullptr;          // [tokens][kv_heads][head_dim]
  const float* v = nullptr;    // the same
  const float* cos = nullptr;  // [tokens][head_dim / 2]
  const float* sin = nullptr;
  const uint32_t* slots = nullptr;  // [tokens]
  CacheLayer cache;
  uint32_t tokens = 0;
  uint32_t heads = 0;                   // of q
  const uint32_t* positions = nullptr;  // [tokens]: rows of cos and sin; null: a token's own
  float q_scale = 1;                    // what q is multiplied with once it is rotated
};

// Attention of new tokens over their sequence's pages, theirs among them: prompts, pieces of some,
// and single tokens alike. The engine's paged_attention() (engine/kernels/attention.h) to the bit,
// whose steps for a query depend on no other: a context is cut into splits of kSplitTokens
// positions, which are added in their order. A task is up to kPageQueries queries of one sequence
// and KV head: numbers [first, first + count) of its (token, head of the group) pairs, tokens
// first.
inline constexpr uint32_t kSplitTokens = 256;
inline constexpr uint32_t kPageQueries = 16;
inline constexpr uint32_t kMaxHeadDim = 256;
struct AttentionTask {
  uint32_t table = 0;     // where the sequence's block table begins in block_tables
  uint32_t position = 0;  // of its first new token
  uint32_t row = 0;       // of that token in q and out
  uint32_t first = 0;
  uint32_t count = 0;
};
struct PageAttention {
  // [tokens][kv_heads][group][head_dim], scaled by 1 / sqrt(head_dim); aligned to 16 bytes.
  const float* q = nullptr;
  float* out = nullptr;  // the same
  const uint32_t* block_tables = nullptr;
  const AttentionTask* tasks = nullptr;
  CacheLayer cache;  // head_dim: a multiple of 16, at most kMaxHeadDim
  uint32_t task_count = 0;
  uint32_t group = 0;   // query heads that share a KV head
  uint32_t window = 0;  // tokens that a token sees, itself included; 0: all
};

// The same of tasks with one new token and up to kTaskQueries queries each, to the same bits:
// attend_splits, or attend_wide_splits for groups of more than kNarrowGroup, has a block for each
// split and KV head; join_splits, behind it, adds the splits of
// tasks that see more than one.
inline constexpr uint32_t kTaskQueries = 8;
inline constexpr uint32_t kNarrowGroup = 4;
inline constexpr uint32_t kPartialExtra = 4;  // before the sums over V: maximum, sum, nothing
struct SplitTask {
  AttentionTask queries;
  uint32_t partial = 0;  // its first split's place among all, of a context without a window
};
struct SplitItem {
  uint32_t task = 0;
  uint32_t split = 0;  // [256 split, 256 split + 256) of its sequence
};
struct SplitAttention {
  const float* q = nullptr;  // as PageAttention has them
  float* out = nullptr;
  const uint32_t* block_tables = nullptr;
  const SplitTask* tasks = nullptr;
  const SplitItem* items = nullptr;  // each split of each task, in any order
  // How many items there are, then how many tasks: read by the kernel, so that a CUDA graph may be
  // replayed with others.
  const uint32_t* counts = nullptr;
  float* partial = nullptr;  // [splits][kv_heads][queries of a task][kPartialExtra + head_dim]
  CacheLayer cache;          // head_dim: a multiple of 16, at most kMaxHeadDim
  uint32_t group = 0;
  uint32_t window = 0;
};
// Shared memory of a block of attend_splits: four of them are on a multiprocessor of 228 KiB.
inline constexpr uint32_t kSplitBytes = 56 << 10;
constexpr uint64_t partial_floats(uint64_t splits, uint32_t kv_heads, uint32_t group,
                                  uint32_t head_dim) {
  const uint32_t queries = group < kTaskQueries ? group : kTaskQueries;
  return splits * kv_heads * queries * (kPartialExtra + head_dim);
}

// One update of parameters of one kind: the trainer's (engine/train/data_parallel/optimizer.h).
struct AdamW {
  float* parameters = nullptr;
  float* first = nullptr;
  float* second = nullptr;
  const float* gradients = nullptr;
  uint64_t count = 0;
  float divisor = 1;  // of the gradients
  float factor = 1;   // of clipping
  float beta1 = 0;
  float beta2 = 0;
  float correct1 = 1;  // 1 - beta1^(step + 1)
  float correct2 = 1;
  float epsilon = 0;
  float rate = 0;
  float decay = 1;  // 1 - rate * weight decay
};

// Draws a token for each row of logits, as the engine's Sampler does without penalties.
inline constexpr int32_t kUndecided = -1;
struct SampleRow {
  double temperature = 0;  // 0: the likeliest
  double top_p = 1;
  double uniform = 0;  // uniform_at(seed, position)
  uint32_t top_k = 0;  // 0: all
};
struct Sample {
  const float* logits = nullptr;  // [rows][vocabulary]
  const SampleRow* rows = nullptr;
  // The Sampler's token; kUndecided where the order in which weights are added could decide: once
  // in 10^9 draws, and then the Sampler is asked.
  int32_t* tokens = nullptr;
  uint32_t row_count = 0;
  uint32_t vocabulary = 0;
};

// Adds to a count of the device's, and writes it to a word of the host's behind all that the stream
// has done before (gpudirect/layer_tickets.h).
struct WriteTicket {
  uint64_t* count = nullptr;
  uint64_t* ticket = nullptr;
  uint64_t add = 0;
};

// Each block waits for a word of the host's, in a running kernel, and never longer than so many
// nanoseconds; `reached` has a 1 for each block that saw it in time.
struct WaitWord {
  const uint64_t* word = nullptr;
  uint64_t at_least = 0;
  uint64_t nanoseconds = 0;
  uint32_t* reached = nullptr;  // [blocks]
};

// Bytes of shared memory that a block of this kernel has besides its own arrays.
constexpr uint32_t large_shared_of(std::string_view kernel) {
  if (kernel == "gemm" || kernel == "gemm_f32") return kExactBytes;
  if (kernel == "gemm_few" || kernel == "gemm_bf16_few") return kFewBytes;
  if (kernel == "attend_splits") return kSplitBytes;
  return kernel == "gemm_bf16" ? kTensorBytes : 0;
}

}  // namespace baton::gpudirect::kernels
