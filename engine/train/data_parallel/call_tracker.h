// The calls of a trainer that are in flight: launched while it computes, waited for later, and what
// that waiting cost.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "transport/timeline.h"

namespace baton::engine::train {

// Tracks of a training timeline.
inline constexpr std::string_view kComputeTrack = "compute";
inline constexpr std::string_view kCommunicationTrack = "communication";
inline constexpr std::string_view kWaitTrack = "wait";

// For one thread. After the first error every wait returns it.
//
// With a timeline a second thread waits too, so that each span ends when its call does and not when
// a caller asks.
class CallTracker {
 public:
  // Names a launched call; 0: none.
  using Id = uint64_t;

  // `timeline` may be null. Both must outlive the tracker.
  CallTracker(Communicator& comm, Timeline* timeline);
  ~CallTracker();  // waits for everything: no buffer is in use afterwards
  CallTracker(const CallTracker&) = delete;
  CallTracker& operator=(const CallTracker&) = delete;

  // Takes over what an _async call returned; an error shows when it is waited for. `begin` is when
  // the call was made.
  Id add(absl::StatusOr<Work> work, Time begin, std::string name, size_t bytes);
  // Blocks until the call has ended.
  absl::Status wait(Id id);
  absl::Status wait_all();  // goes on after errors

  absl::Status status() const;
  // How long waits have blocked so far: communication that was not hidden.
  Time blocked() const { return blocked_; }

 private:
  struct Call {
    Work work;
    std::string name;
    size_t bytes = 0;
    Time begin{};
    bool ended = false;
  };
  void ended(Call& call, const absl::Status& status);  // with the lock held
  void watch();

  Communicator& comm_;
  Timeline* const timeline_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> calls_;  // calls_[i] has id first_ + i
  Id first_ = 1;
  absl::Status status_;
  Time blocked_{};
  bool stop_ = false;
  std::thread watcher_;
};

// Spans of a trainer's computation: what the main thread did between two marks.
class ComputeTrace {
 public:
  // `timeline` may be null: then nothing is recorded.
  explicit ComputeTrace(Timeline* timeline) : timeline_(timeline) {}

  bool on() const { return timeline_ != nullptr; }
  // Computation begins, or goes on after a wait.
  void mark() {
    if (on()) last_ = Clock::steady().now();
  }
  // Records a span for the work since the last mark. `step` groups the spans of a step.
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
