// The scratch memory of a forward pass, as the model sees it.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/kernels/bf16_gemm.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/expert_table.h"
#include "engine/kernels/gemm.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/model.h"
#include "engine/model/rope.h"
#include "engine/model/shard.h"

namespace baton::engine {

inline constexpr int kAttentionTokens = 32;  // new tokens of one attention task
inline constexpr int kStoredTokens = 64;     // whose K and V one task stores: whole blocks
inline constexpr int kGatedTokens = 32;      // feed_forward_bf16() from so many on
static_assert(kStoredTokens % kBlockTokens == 0);

// A slice of one chunk's new tokens, for one of this rank's KV heads or for all.
struct AttentionTask {
  int chunk;
  int kv_head;
  int first;
  int count;
  int row;  // of the chunk's first token in the batch
};

// H, KV, F and V below are this rank's share of heads and columns.
struct Workspace::Impl {
  Impl(const ModelConfig& config, Arithmetic arithmetic, const ModelShard& shard,
       const WorkspaceLimits& given, ComputePool& threads);
  // Without it a shard cannot compute. Does nothing where there is one rank.
  absl::Status use(ShardExchange* ranks, const ModelConfig& config, const ModelShard& shard);
  size_t bytes() const;

  WorkspaceLimits limits;
  ComputePool* pool;
  RopeTable rope;
  GemmScratch gemm_scratch;
  Bf16Scratch bf16_scratch;      // empty in fp32 arithmetic
  AlignedArray<float> x;         // [tokens][d], the residual stream
  AlignedArray<float> normed;    // [tokens][d]
  AlignedArray<float> qkv;       // [tokens][(H + 2 KV) * head_dim]
  AlignedArray<float> attended;  // [tokens][H * head_dim]
  AlignedArray<float> gate_up;   // [tokens][2 F], or of experts [slots][2 F]; the activation
                                 // replaces gate
  AlignedArray<float> logits;    // [chunks][V]
  AlignedArray<float> attention;
  std::vector<int> positions;             // of each token of the batch
  std::vector<std::pair<int, int>> rows;  // (chunk, batch row of its last token) wanting logits
  std::vector<AttentionTask> tasks;
  std::vector<AttentionTask> stores;  // of K and V, all heads

  // With experts:
  ExpertTable experts;
  AlignedArray<float> expert_rows;  // [slots][d]: what experts are asked, then what they say
  // With whole experts at each rank: what this rank asks, and who is asked here.
  std::vector<int32_t> chosen;
  std::vector<float> weights;
  std::vector<ExpertTable::Group> groups;

  // With several ranks:
  ShardExchange* exchange = nullptr;
  float* exchanged = nullptr;    // [ranks][rows][columns of a slice]
  size_t exchanged_floats = 0;   // that all of it takes
  AlignedArray<float> gathered;  // [rows][columns], of what is multiplied next, or logits
};

}  // namespace baton::engine
