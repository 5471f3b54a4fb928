// What a rank's cache and steps can hold: equal at all ranks of a model.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/model.h"
#include "engine/model/model_runner.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine::shard {

struct StepLimits {
  uint32_t blocks = 2048;     // of the KV cache
  size_t token_budget = 512;  // tokens in a step
  size_t max_sequences = 16;  // sequences in a step

  // Prompt and output together.
  size_t max_context(const Model& model) const {
    return std::min<size_t>(model.config().max_position_embeddings, size_t{blocks} * kBlockTokens);
  }
  WorkspaceLimits workspace(const Model& model) const {
    return {.max_tokens = static_cast<int>(token_budget),
            .max_chunks = static_cast<int>(max_sequences),
            .max_context = static_cast<int>(max_context(model))};
  }
};

// The memory of a KV cache: a device's, or our own.
class KvMemory {
 public:
  // `runner`, if given, says whether the memory is a device's. `shared`: processes of this machine
  // can map it, where the kernel lets it be a file(). ResourceExhausted: there is not so much
  // memory.
  static absl::StatusOr<KvMemory> make(const Model& model, uint32_t blocks,
                                       ModelRunner* runner = nullptr, bool shared = false);
  KvCache& cache() { return *cache_; }
  int file() const { return own_.file(); }  // -1: none

 private:
  base::CacheMemory own_;
  std::optional<KvCache> cache_;
};

}  // namespace baton::engine::shard
