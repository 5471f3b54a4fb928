// Spans of a trainer's computation: what the main thread did between two marks.
#pragma once

#include <string>
#include <utility>

#include "engine/train/data_parallel/call_tracker.h"
#include "transport/timeline.h"

namespace baton::engine::train {

class ComputeTrace {
 public:
  // `timeline` may be null: then nothing is recorded.
  explicit ComputeTrace(Timeline* timeline) : timeline_(timeline) {}

  bool on() const { return timeline_ != nullptr; }
  // Computation begins, or goes on after a wait.
  void mark() {
    if (on()) last_ = Clock::steady().now();
  }
  // What was done since the last mark. `step` groups the spans of a step.
  void span(std::string name, int step) {
    if (!on()) return;
    const Time now = Clock::steady().now();
    timeline_->add(
        {kComputeTrack, std::move(name), last_, now, static_cast<uint64_t>(step) + 1, 0});
    last_ = now;
  }

 private:
  Timeline* const timeline_;
  Time last_{};
};

}  // namespace baton::engine::train
