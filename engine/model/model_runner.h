// Runs a model's steps: on the CPU, or on a device (engine/device/device_model.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/compute_pool.h"
#include "engine/kernels/kv_cache.h"
#include "engine/model/model.h"

namespace baton::engine {

// Not thread-safe: of one engine. forward() keeps the promise at the top of model.h, to the bit.
class ModelRunner {
 public:
  virtual ~ModelRunner() = default;
  // For people.
  virtual std::string name() const = 0;
  // Once, before the first forward(): what a step may hold.
  virtual absl::Status prepare(const WorkspaceLimits& limits) = 0;
  // Memory for a KV cache where this runner reads it, valid as long as the runner: device memory,
  // which the CPU must not touch. Null: the runner reads host memory, which the caller allocates.
  virtual absl::StatusOr<void*> allocate_cache(size_t bytes) = 0;
  // The device whose memory that is; none: the host's.
  virtual std::optional<int> device() const { return std::nullopt; }
  // As Model::forward(). On a device kv_written(l) may come after before_layer(l + 1), in the order
  // of the layers all the same: when it comes, the bytes are there for every reader.
  virtual absl::Status forward(std::span<const SequenceChunk> chunks, KvCache& cache,
                               LayerHook& hook, float* logits) = 0;
  // OK as long as it is of use. After another answer it never is again: the reason, in words for
  // people.
  virtual absl::Status alive() const { return absl::OkStatus(); }
  // The token that the last forward() drew by SequenceChunk::draw: the Sampler's, to the token.
  // Nothing: its logits are there.
  virtual std::optional<int32_t> drawn(size_t /*chunk*/) const { return std::nullopt; }
};

// By Model::forward(). The model, the pool and the exchange outlive it.
class CpuRunner final : public ModelRunner {
 public:
  CpuRunner(const Model& model, ComputePool& pool, ShardExchange* exchange)
      : model_(model), pool_(pool), exchange_(exchange) {}
  std::string name() const override { return "the CPU"; }
  absl::Status prepare(const WorkspaceLimits& limits) override {
    absl::StatusOr<Workspace> workspace = model_.make_workspace(limits, pool_, exchange_);
    if (!workspace.ok()) return workspace.status();
    workspace_ = *std::move(workspace);
    return absl::OkStatus();
  }
  absl::StatusOr<void*> allocate_cache(size_t /*bytes*/) override { return nullptr; }
  absl::Status forward(std::span<const SequenceChunk> chunks, KvCache& cache, LayerHook& hook,
                       float* logits) override {
    return model_.forward(chunks, cache, hook, *workspace_, logits);
  }

 private:
  const Model& model_;
  ComputePool& pool_;
  ShardExchange* const exchange_;
  std::optional<Workspace> workspace_;
};

}  // namespace baton::engine
