// KV that goes to other engines, and comes from them, by the name of a transfer: whose blocks stay.
#include <poll.h>

#include <algorithm>
#include <utility>

#include "engine/serve/engine.h"

namespace baton::engine::serve {
namespace {

constexpr Time kTick = std::chrono::milliseconds(1);

}  // namespace

absl::Status Engine::start_sessions() {
  if (options_.hand_off == nullptr) return absl::OkStatus();
  const absl::Status used =
      options_.hand_off->use_cache(memory_->cache(), runner_->device(), memory_->file());
  if (!used.ok()) return used;
  const auto layers = static_cast<uint32_t>(model_.config().num_layers);
  sessions_.emplace(*options_.hand_off, options_.leader, layers);
  absl::StatusOr<std::string> address = sessions_->address();
  if (!address.ok()) return address.status();
  kv_address_ = *std::move(address);
  loads_.emplace(RemoteLoadOptions{.layers = layers,
                                   .min_tokens = options_.min_remote_tokens,
                                   .on_failure = options_.on_load_failure,
                                   .timeout = options_.load_timeout,
                                   .silence = options_.load_silence,
                                   .ranks = static_cast<uint32_t>(model_.shard().ranks),
                                   .by_name = true,
                                   .push = options_.push},
                 *sessions_, blocks_);
  scheduler_.use_sessions(*sessions_, *loads_);
  hook_.use_sessions(*sessions_);
  return absl::OkStatus();
}

uint64_t Engine::kv_bytes(size_t tokens) const {
  return tokens * model_.kv_geometry().token_bytes() * static_cast<uint64_t>(model_.shard().ranks);
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

// Frees the blocks that other engines have, or will not fetch any more, and begins what they ask
// for.
bool Engine::follow_sends() {
  sessions_->progress();
  for (const uint64_t send : sessions_->released()) {
    const auto it = held_.find(send);
    if (it == held_.end()) continue;
    blocks_.release(it->second);
    held_.erase(it);
  }
  const size_t before = asked_.size();
  std::erase_if(asked_, [this](uint64_t id) {
    const auto it = requests_.find(id);
    if (it == requests_.end()) return true;
    if (sessions_->is_wanted(it->second->send)) return false;
    finish(it->second.get(), FinishReason::kAbort,
           absl::CancelledError("the decode worker cancelled the request"));
    return true;
  });
  bool changed = asked_.size() != before;
  while (std::optional<kvtransfer::KvAsked> asked = sessions_->next_asked()) {
    Request request;
    request.id = next_asked_++;
    request.tokens = std::move(asked->tokens);
    request.sampling.max_tokens = 0;
    request.hand_over = asked->transfer;
    request.asked = asked->request;
    const uint64_t id = request.id;
    const absl::Status status = add_request(std::move(request));
    if (status.ok()) {
      asked_.push_back(id);
    } else {
      sessions_->refuse(asked->transfer, status);
    }
    changed = true;
  }
  return changed;
}

// Before a request gives its blocks up, which stay as long as another engine may read them. What
// its client has to tell the engine that goes on with it, if one may.
std::optional<kvtransfer::KvTransfer> Engine::end_hand_off(Sequence& sequence, FinishReason reason,
                                                           const absl::Status& why) {
  if (!sessions_.has_value()) return std::nullopt;
  if (sequence.request.remote_prefill.has_value()) {  // it ended before it began
    sessions_->decline(*std::exchange(sequence.request.remote_prefill, {}));
  }
  const uint64_t send = std::exchange(sequence.send, 0);
  if (send == 0) return std::nullopt;
  const size_t blocks = std::min((sequence.prompt_tokens + kBlockTokens - 1) / kBlockTokens,
                                 sequence.load != 0 ? 0 : sequence.blocks.size());
  std::vector<uint32_t> kept(sequence.blocks.begin(),
                             sequence.blocks.begin() + static_cast<ptrdiff_t>(blocks));
  const bool failed = (reason != FinishReason::kStop && reason != FinishReason::kLength) ||
                      sequence.computed < sequence.prompt_tokens;
  // A reader that is late finds a wrong checksum; of a device's memory none is taken.
  if (failed && !runner_->device().has_value()) {
    sessions_->drop(send);
    return std::nullopt;
  }
  blocks_.add_references(kept);
  held_.emplace(send, std::move(kept));
  if (failed) {
    sessions_->fail(send, why.ok() ? absl::CancelledError("prefill did not compute it") : why);
    return std::nullopt;
  }
  for (int layer = 0; options_.serialize_sends && layer < model_.config().num_layers; ++layer) {
    sessions_->computed(send, static_cast<uint32_t>(layer), sequence.prompt_tokens,
                        sequence.blocks);
  }
  sessions_->hold(send);
  stats_.kv_bytes_sent += kv_bytes(sequence.prompt_tokens);
  return sessions_->params_of(*sequence.request.hand_over);
}

void Engine::wait(Time timeout, int fd) {
  if (options_.leader != nullptr) options_.leader->look();
  if (tiers_ != nullptr) {
    // They do not hear of what the others have.
    if (sessions_.has_value() && has_work()) timeout = std::min(timeout, kTick);
    return tiers_->wait(timeout, fd);
  }
  if (sessions_.has_value()) return sessions_->wait(timeout, fd);
  pollfd entry{fd, POLLIN, 0};  // one that is negative is passed over
  poll(&entry, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(timeout).count()));
}

}  // namespace baton::engine::serve
