// Tensor parallelism: which part of a model a rank holds, and how ranks put their parts together.
//
// Every matrix product is split by its columns, never along the sum: a rank computes some elements
// of the result, each from all of the input, as one chain that does not know how many ranks there
// are. What ranks exchange is therefore whole elements. No sum crosses ranks, and every result has
// the bits that one rank alone gives it. (Splitting the sums of every second product instead would
// halve the number of exchanges, and change the bits with the number of ranks.)
//
// With `expert_parallel` a rank holds instead of its columns of every expert some experts whole, as
// many as each other rank. Each rank then has a share of a step's tokens, whose rows it sends to
// the ranks of their experts (collectives/experts.h).
//
// A rank holds the query, key and value heads of its share, and of every other product the columns
// of its slice, of every expert too; routers, norms, embeddings and the residual stream are whole
// at every rank. Of the KV cache it holds its own heads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine {

struct ModelConfig;

struct ModelShard {
  int rank = 0;
  int ranks = 1;
  bool expert_parallel = false;
  constexpr bool whole() const { return ranks == 1; }
  friend bool operator==(const ModelShard&, const ModelShard&) = default;
};

// Columns [begin, end) of a result.
struct Slice {
  int begin = 0;
  int end = 0;
  int size() const { return end - begin; }
};

// Slices are of whole vectors, so that kernels between the products need no remainders. The widest
// of them, in columns; the last ones may be narrower, or empty. Of heads all are equal.
constexpr int slice_width(int columns, int ranks) {
  constexpr int kUnit = 16;
  return ((columns + kUnit - 1) / kUnit + ranks - 1) / ranks * kUnit;
}
constexpr Slice slice_of(int columns, const ModelShard& shard) {
  if (shard.whole()) return {0, columns};
  const int width = slice_width(columns, shard.ranks);
  const int begin = std::min(columns, shard.rank * width);
  return {begin, std::min(columns, begin + width)};
}

// The tokens of a step whose experts a rank asks.
constexpr int tokens_of_rank(int tokens, int ranks) { return (tokens + ranks - 1) / ranks; }
constexpr Slice share_of(int tokens, const ModelShard& shard) {
  const int width = tokens_of_rank(tokens, shard.ranks);
  const int begin = std::min(tokens, shard.rank * width);
  return {begin, std::min(tokens, begin + width)};
}

// InvalidArgument unless `ranks` divides the model's KV heads, with `expert_parallel` its experts
// too, and the rank is one of them.
absl::Status check_shard(const ModelConfig& config, const ModelShard& shard);

// How the ranks of one model talk during a forward pass. One thread at a time.
class ShardExchange {
 public:
  virtual ~ShardExchange() = default;
  // Memory for all_gather(), zeroed; lives as long as this object.
  virtual absl::StatusOr<float*> allocate(size_t floats) = 0;
  // `all` is [ranks][count], from allocate(). Every rank has filled its own part, and has all parts
  // afterwards. All ranks make the same calls. After an error nothing works any more.
  virtual absl::Status all_gather(float* all, size_t count) = 0;

  // --- with expert_parallel: as collectives/experts.h, in f32, round by round ---
  struct ExpertShape {
    int experts = 0;
    int per_token = 0;
    int hidden = 0;
    int max_tokens = 0;  // of one rank
  };
  struct Asked {
    struct Group {
      int expert = 0;  // of this rank's, from 0
      int first = 0;
      int count = 0;
    };
    std::vector<Group> groups;       // that have tokens, in ascending number
    std::vector<const float*> rows;  // [slots]
    float* answers = nullptr;        // [slots][hidden]
  };
  // Before the first round; all ranks expect the same.
  virtual void expect_experts(const ExpertShape& /*shape*/) {}
  virtual absl::StatusOr<Asked> ask_experts(const float* /*rows*/, int /*tokens*/,
                                            std::span<const int32_t> /*chosen*/) {
    return absl::UnimplementedError("these ranks do not share experts");
  }
  // out: [tokens][hidden].
  virtual absl::Status sum_answers(std::span<const float> /*weights*/, float* /*out*/,
                                   size_t /*floats*/) {
    return absl::UnimplementedError("these ranks do not share experts");
  }
};

}  // namespace baton::engine
