// What the workers of a ComputePool sleep on: rung when there is work, and once more at the end.
#pragma once

#include <atomic>

#include "hwy/cache_control.h"

namespace baton::engine {

// Work and the end are one number, so that no worker can hear of the one and miss the other: a
// worker that has looked before either does not sleep.
class PoolBell {
 public:
  // For wait(); a worker looks before it looks for work.
  int look() const { return state_.load(); }
  static bool is_end(int seen) { return (seen & kEnd) != 0; }

  void ring() {
    state_.fetch_add(kRing);
    state_.notify_all();
  }
  void end() {
    state_.fetch_or(kEnd);
    state_.notify_all();
  }
  // Returns when something was rung since look() returned `seen`: spins for a while, then sleeps.
  void wait(int seen) const {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (state_.load(std::memory_order_acquire) != seen) return;
      hwy::Pause();
    }
    state_.wait(seen);
  }

 private:
  static constexpr int kEnd = 1;
  static constexpr int kRing = 2;
  // About 50 us: longer than the gap between two kernels.
  static constexpr int kSpins = 1000;

  std::atomic<int> state_{0};
};

}  // namespace baton::engine
