// Sizes of a forward pass's scratch memory.
#include "engine/model/workspace.h"

#include <algorithm>

#include "engine/kernels/attention.h"

namespace baton::engine {

Workspace::Impl::Impl(const ModelConfig& config, Arithmetic arithmetic, const ModelShard& shard,
                      const WorkspaceLimits& given, ComputePool& threads)
    : limits(given),
      pool(&threads),
      rope(config, limits.max_context),
      gemm_scratch(threads.size()) {
  const auto own = [&](int columns) { return size_t(slice_of(columns, shard).size()); };
  const size_t tokens = static_cast<size_t>(limits.max_tokens);
  const size_t chunks = static_cast<size_t>(limits.max_chunks);
  const size_t d = static_cast<size_t>(config.hidden_size);
  const int q = config.num_heads * config.head_dim;
  const int kv = config.num_kv_heads * config.head_dim;
  x = AlignedArray<float>(tokens * d);
  normed = AlignedArray<float>(std::max(tokens, chunks) * d);
  qkv = AlignedArray<float>(tokens * (own(q) + 2 * own(kv)));
  attended = AlignedArray<float>(tokens * own(q));
  const size_t slots = tokens * static_cast<size_t>(config.experts_per_token);
  const size_t expert_size =
      shard.expert_parallel ? static_cast<size_t>(config.expert_size) : own(config.expert_size);
  gate_up = AlignedArray<float>(
      2 * std::max(tokens * own(config.intermediate_size), slots * expert_size));
  if (config.num_experts > 0) {
    experts = ExpertTable(config.num_experts, config.experts_per_token, config.norm_topk_prob,
                          limits.max_tokens, threads.size());
    expert_rows = AlignedArray<float>(slots * d);
  }
  logits = AlignedArray<float>(chunks * own(config.vocab_size));
  attention = AlignedArray<float>(kAttentionScratch * threads.size());
  if (arithmetic == Arithmetic::kBf16) {
    const int longest =
        std::max({config.hidden_size, q, config.intermediate_size, config.expert_size});
    bf16_scratch =
        Bf16Scratch(limits.bf16_unit, static_cast<int>(std::max(tokens, chunks)), longest,
                    threads.size(), shard.whole() ? config.intermediate_size : 0);
  }
  positions.reserve(tokens);
  rows.reserve(chunks);
  stores.reserve(2 * chunks + tokens / kStoredTokens);
  tasks.reserve((chunks + tokens / kAttentionTokens) * config.num_kv_heads / shard.ranks);
}

absl::Status Workspace::Impl::use(ShardExchange* ranks, const ModelConfig& config,
                                  const ModelShard& shard) {
  if (shard.whole()) return absl::OkStatus();
  if (ranks == nullptr) {
    return absl::InvalidArgumentError("a part of a model needs a ShardExchange to the others");
  }
  const size_t tokens = static_cast<size_t>(limits.max_tokens);
  const size_t chunks = static_cast<size_t>(limits.max_chunks);
  const int q = config.num_heads * config.head_dim;
  const int widest = std::max({q, config.hidden_size, config.intermediate_size});
  const auto slice = [&](int columns) { return size_t(slice_width(columns, shard.ranks)); };
  const size_t slots = tokens * static_cast<size_t>(config.experts_per_token);
  exchanged_floats = static_cast<size_t>(shard.ranks) *
                     std::max({tokens * slice(widest), slots * slice(config.expert_size),
                               chunks * slice(config.vocab_size),
                               size_t(tokens_of_rank(limits.max_tokens, shard.ranks)) *
                                   size_t(config.hidden_size)});
  if (shard.expert_parallel) {
    ranks->expect_experts({config.num_experts, config.experts_per_token, config.hidden_size,
                           tokens_of_rank(limits.max_tokens, shard.ranks)});
  }
  absl::StatusOr<float*> memory = ranks->allocate(exchanged_floats);
  if (!memory.ok()) return memory.status();
  exchange = ranks;
  exchanged = *memory;
  gathered = AlignedArray<float>(
      std::max({tokens * std::max(q, config.intermediate_size), slots * size_t(config.expert_size),
                chunks * size_t(config.vocab_size)}));
  return absl::OkStatus();
}

size_t Workspace::Impl::bytes() const {
  const size_t floats = x.size() + normed.size() + qkv.size() + attended.size() + gate_up.size() +
                        logits.size() + attention.size() + rope.cosines.size() + rope.sines.size() +
                        gathered.size() + exchanged_floats + expert_rows.size();
  return floats * sizeof(float) + gemm_scratch.bytes() + bf16_scratch.bytes() + experts.bytes();
}

Workspace::Workspace(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;
const WorkspaceLimits& Workspace::limits() const { return impl_->limits; }
size_t Workspace::bytes() const { return impl_->bytes(); }

}  // namespace baton::engine
