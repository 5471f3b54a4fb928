// A few threads that run the tasks of one kernel at a time and allocate nothing per call.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "hwy/cache_control.h"

namespace baton::engine {

// The workers of a ComputePool sleep on this bell. It rings when there is work, and once when the
// pool ends. One number covers both, so that no worker misses either: a worker that looked before
// the number changed does not fall asleep.
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

// One caller at a time. The calling thread takes part, so a pool of n starts n - 1 threads and a
// pool of one runs everything inline. Workers spin briefly for the next kernel, then sleep; a
// worker that is slow to wake is not waited for.
class ComputePool {
 public:
  // `threads` < 1 means one per online CPU.
  explicit ComputePool(int threads = 1);
  ~ComputePool();
  ComputePool(const ComputePool&) = delete;
  ComputePool& operator=(const ComputePool&) = delete;

  int size() const { return size_; }

  // Runs fn(task, thread) for every task in [0, tasks) and returns when all are done. Which
  // thread runs which task is not determined, so a task's result must not depend on it.
  template <typename Fn>
  void parallel_for(int64_t tasks, Fn&& fn) {
    using Target = std::remove_reference_t<Fn>;
    const Call call = [](void* target, int64_t task, int thread) {
      (*static_cast<Target*>(target))(task, thread);
    };
    run(tasks, call, const_cast<std::remove_const_t<Target>*>(&fn));
  }

 private:
  using Call = void (*)(void* target, int64_t task, int thread);
  void run(int64_t tasks, Call call, void* target);
  void work(int thread);
  bool run_one(int thread);

  int size_;
  // High half: which kernel; low half: tasks of it that are not claimed yet. The three fields
  // below it change only while no task is claimed or claimable, so a successful claim proves that
  // they were read from the same kernel.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> target_{nullptr};
  std::atomic<int64_t> tasks_{0};
  std::atomic<int64_t> done_{0};
  PoolBell bell_;
  std::vector<std::thread> threads_;
};

}  // namespace baton::engine
