// What happens between the layers of a forward pass: KV is sent, awaited and timed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/handoff/hand_off.h"
#include "engine/model/model.h"
#include "engine/serve/liveness.h"
#include "engine/shard/leader.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"
#include "transport/timeline.h"

namespace baton::engine::serve {

// Reused from step to step, so that its buffers are too.
class StepHook : public LayerHook {
 public:
  // `connector` and `timeline` may be null.
  StepHook(kvtransfer::KvConnector* connector, Timeline* timeline, const Clock& clock,
           Liveness& liveness)
      : connector_(connector), timeline_(timeline), clock_(clock), liveness_(liveness) {}

  // Forgets the last step. `request` labels the spans; 0 where the batch has several.
  void begin(uint64_t request);
  // In every layer these blocks of `job` become complete; `blocks` must outlive the step.
  void send(uint64_t job, uint32_t first_block, absl::Span<const uint32_t> blocks);
  // In every layer the first `tokens` tokens of what HandOff calls `send` become complete, in these
  // blocks, which must outlive the step.
  void hand_over(uint64_t send, size_t tokens, absl::Span<const uint32_t> blocks) {
    handed_.push_back({send, tokens, blocks});
  }
  void use_hand_off(handoff::HandOff& hand_off) { hand_off_ = &hand_off; }
  // Every layer of this load is waited for: until it is here or fails, but not for longer than
  // 100 ms and not when `wake_fd` (-1: none) becomes readable. Then before_layer() ends the
  // forward pass with Aborted, and stalled_at() says which layer was missing.
  void await(kvtransfer::KvSource& source, kvtransfer::KvRequestId load, int wake_fd) {
    source_ = &source;
    load_ = load;
    wake_fd_ = wake_fd;
  }
  std::optional<uint32_t> stalled_at() const { return stalled_at_; }
  // For how long layers were waited for.
  Time waited() const { return waited_; }
  // Ends the last layer's span.
  void end();
  // Receives logits that chunks want of every token.
  using OnLogits = std::function<void(size_t chunk, size_t token, std::span<const float>)>;
  void on_token_logits(OnLogits task) { on_token_logits_ = std::move(task); }

  // What send() was told since begin().
  const std::vector<shard::StepSend>& sends() const { return sends_; }
  // OK or the first thing that went wrong when sending for `job`.
  absl::Status send_status(uint64_t job) const;

  absl::Status before_layer(int layer) override;
  bool waits() const override { return load_ != 0; }
  bool hears_layers() const override { return !sends_.empty() || !handed_.empty(); }
  void while_waiting() override {
    if (connector_ != nullptr) connector_->progress();
  }
  void kv_written(int layer) override;
  void token_logits(size_t chunk, size_t token, std::span<const float> logits) override {
    on_token_logits_(chunk, token, logits);
  }

 private:
  absl::Status wait_for_layer(uint32_t layer);

  kvtransfer::KvConnector* const connector_;
  Timeline* const timeline_;
  const Clock& clock_;
  Liveness& liveness_;
  std::vector<shard::StepSend> sends_;
  std::vector<absl::Status> sent_;  // how each went
  struct Handed {
    uint64_t send = 0;
    size_t tokens = 0;
    absl::Span<const uint32_t> blocks;
  };
  handoff::HandOff* hand_off_ = nullptr;
  std::vector<Handed> handed_;
  OnLogits on_token_logits_;
  kvtransfer::KvSource* source_ = nullptr;  // of the load
  kvtransfer::KvRequestId load_ = 0;
  int wake_fd_ = -1;
  std::optional<uint32_t> stalled_at_;
  Time waited_{};
  uint64_t request_ = 0;
  int layer_ = -1;  // whose span is open
  Time begin_{};
};

}  // namespace baton::engine::serve
