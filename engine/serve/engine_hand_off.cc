// KV that goes to other engines, and comes from them, by the name of a transfer: whose blocks stay.
#include <poll.h>

#include <algorithm>
#include <array>
#include <utility>

#include "engine/serve/engine.h"

namespace baton::engine::serve {
namespace {

constexpr Time kTick = std::chrono::milliseconds(1);

}  // namespace

absl::Status Engine::start_hand_off() {
  if (options_.hand_off == nullptr) return absl::OkStatus();
  if (options_.leader != nullptr) {
    return absl::UnimplementedError(
        "KV of a model in several parts cannot be handed over by name: use one tensor-parallel "
        "rank, or no --kv-agent");
  }
  if (absl::Status status = options_.hand_off->use_cache(memory_->cache()); !status.ok()) {
    return status;
  }
  hand_off_loads_.emplace(
      RemoteLoadOptions{.layers = static_cast<uint32_t>(model_.config().num_layers),
                        .min_tokens = options_.min_remote_tokens,
                        .on_failure = options_.on_load_failure,
                        .timeout = options_.load_timeout,
                        .silence = options_.load_silence,
                        .by_name = true},
      *options_.hand_off, blocks_);
  scheduler_.use_hand_off(*options_.hand_off, *hand_off_loads_);
  hook_.use_hand_off(*options_.hand_off);
  return absl::OkStatus();
}

absl::Status Engine::check_hand_off(const Request& request) const {
  if (!request.hand_over.has_value() && !request.remote_prefill.has_value()) {
    return absl::OkStatus();
  }
  if (options_.hand_off == nullptr) {
    return absl::InvalidArgumentError(
        "kv_transfer_params ask for a KV hand-over, but this server has no agent for it: start it "
        "with --kv-agent NAME --kv-agent-address HOST:PORT");
  }
  if (request.hand_over.has_value() &&
      (request.remote_prefill.has_value() || !request.prefill_address.empty())) {
    return absl::InvalidArgumentError(
        "kv_transfer_params ask for KV both to be loaded and to be handed over: the server that "
        "hands a prompt's KV over computes the prompt");
  }
  return absl::OkStatus();
}

// Frees the blocks that other engines have, or will not fetch any more.
void Engine::follow_hand_off() {
  options_.hand_off->progress();
  for (const uint64_t send : options_.hand_off->released()) {
    const auto it = held_.find(send);
    if (it == held_.end()) continue;
    blocks_.release(it->second);
    held_.erase(it);
  }
}

// Before a request gives its blocks up. What its client has to tell the engine that goes on with
// it, if one may.
std::optional<kvtransfer::KvTransfer> Engine::end_hand_off(Sequence& sequence,
                                                           FinishReason reason) {
  if (options_.hand_off == nullptr) return std::nullopt;
  if (sequence.request.remote_prefill.has_value()) {  // it ended before it began
    options_.hand_off->decline(*std::exchange(sequence.request.remote_prefill, {}));
  }
  const uint64_t send = std::exchange(sequence.send, 0);
  if (send == 0) return std::nullopt;
  if ((reason != FinishReason::kStop && reason != FinishReason::kLength) ||
      sequence.computed < sequence.prompt_tokens) {
    options_.hand_off->drop(send);
    return std::nullopt;
  }
  const size_t blocks = (sequence.prompt_tokens + kBlockTokens - 1) / kBlockTokens;
  std::vector<uint32_t> kept(sequence.blocks.begin(),
                             sequence.blocks.begin() + static_cast<ptrdiff_t>(blocks));
  blocks_.add_references(kept);
  held_.emplace(send, std::move(kept));
  options_.hand_off->hold(send);
  return options_.hand_off->params_of(*sequence.request.hand_over);
}

void Engine::wait(Time timeout, int fd) {
  if (options_.leader != nullptr) options_.leader->look();
  handoff::HandOff* const hand_off = options_.hand_off;
  if (connector_ != nullptr || tiers_ != nullptr) {
    // They do not hear of what the others have.
    const bool others = (connector_ != nullptr && tiers_ != nullptr) || hand_off != nullptr;
    if (others && has_work()) timeout = std::min(timeout, kTick);
    connector_ != nullptr ? connector_->wait(timeout, fd) : tiers_->wait(timeout, fd);
    return;
  }
  std::array<pollfd, 2> entries = {
      pollfd{fd, POLLIN, 0}, pollfd{hand_off != nullptr ? hand_off->event_fd() : -1, POLLIN, 0}};
  poll(entries.data(), entries.size(),  // one that is negative is passed over
       static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(timeout).count()));
}

}  // namespace baton::engine::serve
