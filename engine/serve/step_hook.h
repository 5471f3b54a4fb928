// What happens between the layers of a forward pass: KV is sent, awaited and timed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/model/model.h"
#include "engine/serve/liveness.h"
#include "engine/shard/kv_ranks.h"
#include "engine/shard/leader.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"
#include "transport/timeline.h"

namespace baton::engine::serve {

// Reused from step to step, so that its buffers are too.
class StepHook : public LayerHook {
 public:
  // `timeline` may be null.
  StepHook(Timeline* timeline, const Clock& clock, Liveness& liveness)
      : timeline_(timeline), clock_(clock), liveness_(liveness) {}

  // Forgets the last step. `request` labels the spans; 0 where the batch has several.
  void begin(uint64_t request);
  // In every layer the first `tokens` tokens of what KvRanks calls `send` become complete, in these
  // blocks of a chunk, which must outlive the step.
  void hand_over(uint64_t send, size_t tokens, absl::Span<const uint32_t> blocks, size_t chunk) {
    sends_.push_back({send, tokens, static_cast<uint32_t>(chunk)});
    blocks_.push_back(blocks);
  }
  void use_sessions(shard::KvRanks& sessions) { sessions_ = &sessions; }
  // Every layer of this load is waited for: until it is here or fails, but not for longer than
  // 100 ms and not when `wake_fd` (-1: none) becomes readable. Then before_layer() ends the
  // forward pass with Aborted, and stalled_at() says which layer was missing.
  void await(kvtransfer::KvSource& source, kvtransfer::KvRequestId load, int wake_fd) {
    source_ = &source;
    load_ = load;
    wake_fd_ = wake_fd;
  }
  std::optional<uint32_t> stalled_at() const { return stalled_at_; }
  // Ends the last layer's span.
  void end();
  // Receives logits that chunks want of every token.
  using OnLogits = std::function<void(size_t chunk, size_t token, std::span<const float>)>;
  void on_token_logits(OnLogits task) { on_token_logits_ = std::move(task); }

  // What hand_over() was told since begin().
  const std::vector<shard::StepSend>& sends() const { return sends_; }

  absl::Status before_layer(int layer) override;
  bool waits() const override { return load_ != 0; }
  bool hears_layers() const override { return !sends_.empty(); }
  void kv_written(int layer) override;
  void token_logits(size_t chunk, size_t token, std::span<const float> logits) override {
    on_token_logits_(chunk, token, logits);
  }

 private:
  absl::Status wait_for_layer(uint32_t layer);

  Timeline* const timeline_;
  const Clock& clock_;
  Liveness& liveness_;
  shard::KvRanks* sessions_ = nullptr;
  std::vector<shard::StepSend> sends_;
  std::vector<absl::Span<const uint32_t>> blocks_;  // of each
  OnLogits on_token_logits_;
  kvtransfer::KvSource* source_ = nullptr;  // of the load
  kvtransfer::KvRequestId load_ = 0;
  int wake_fd_ = -1;
  std::optional<uint32_t> stalled_at_;
  uint64_t request_ = 0;
  int layer_ = -1;  // whose span is open
  Time begin_{};
};

}  // namespace baton::engine::serve
