// Sends, awaits and times the KV of each layer during a forward pass.
#include "engine/serve/step_hook.h"

#include <poll.h>

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::serve {
namespace {

constexpr Time kLayerPatience = std::chrono::milliseconds(100);
constexpr Time kSpin = std::chrono::microseconds(50);  // before sleeping

}  // namespace

void StepHook::begin(uint64_t request) {
  sends_.clear();
  blocks_.clear();
  load_ = 0;
  stalled_at_.reset();
  request_ = request;
  layer_ = -1;
}

void StepHook::end() {
  if (timeline_ != nullptr && layer_ >= 0) {
    timeline_->add({.track = "compute",
                    .name = absl::StrCat("layer ", layer_),
                    .begin = begin_,
                    .end = clock_.now(),
                    .request = request_});
  }
  layer_ = -1;
}

// A prefill worker may hang at any layer, and all other requests wait for this thread.
absl::Status StepHook::wait_for_layer(uint32_t layer) {
  const Time until = clock_.now() + kLayerPatience;
  Time busy = clock_.now();
  for (;;) {
    if (source_->layers_loaded(load_) > layer) return absl::OkStatus();
    if (absl::Status status = source_->load_status(load_); !status.ok()) return status;
    source_->progress();
    const Time now = clock_.now();
    pollfd wake{wake_fd_, POLLIN, 0};
    if (now >= until || (wake_fd_ >= 0 && poll(&wake, 1, 0) > 0)) {
      stalled_at_ = layer;
      return absl::AbortedError(absl::StrCat("layer ", layer, " is not here yet"));
    }
    if (now - busy < kSpin) continue;
    source_->wait(until - now, wake_fd_);
    busy = clock_.now();
  }
}

absl::Status StepHook::before_layer(int layer) {
  end();
  if (load_ != 0) {
    const Time begin = clock_.now();
    absl::Status status = wait_for_layer(static_cast<uint32_t>(layer));
    if (!status.ok()) return status;
    if (timeline_ != nullptr) {
      timeline_->add({.track = "wait",
                      .name = absl::StrCat("wait for layer ", layer),
                      .begin = begin,
                      .end = clock_.now(),
                      .request = request_});
    }
  }
  liveness_.moved();
  layer_ = layer;
  begin_ = timeline_ != nullptr ? clock_.now() : Time{};
  return absl::OkStatus();
}

void StepHook::kv_written(int layer) {
  for (size_t i = 0; i < sends_.size(); ++i) {
    sessions_->computed(sends_[i].id, static_cast<uint32_t>(layer), sends_[i].tokens, blocks_[i]);
  }
}

}  // namespace baton::engine::serve
