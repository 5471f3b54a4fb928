// Checks the degrees of tensor parallelism that a model supports.
#include "engine/model/shard.h"

#include "absl/strings/str_cat.h"
#include "engine/model/config.h"

namespace baton::engine {

absl::Status check_shard(const ModelConfig& config, const ModelShard& shard) {
  if (shard.ranks < 1 || shard.rank < 0 || shard.rank >= shard.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", shard.rank, " of ", shard.ranks));
  }
  if (config.num_kv_heads % shard.ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor-parallel size of ", shard.ranks, " does not divide the model's ",
                     config.num_kv_heads, " KV heads: use one that does"));
  }
  if (shard.expert_parallel && (config.num_experts == 0 || config.num_experts % shard.ranks != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", config.num_experts, " experts, which ", shard.ranks,
                     " ranks cannot share evenly: leave out --enable-expert-parallel"));
  }
  return absl::OkStatus();
}

}  // namespace baton::engine
