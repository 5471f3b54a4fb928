// The lock of a worker's progress. A thread that takes the lock in every round and releases it only
// for moments would starve others while it has work, because a mutex goes to the first comer and a
// woken thread comes late. So that thread sees that others wait, and yields.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <mutex>

#include "transport/base/threads/forks.h"

namespace baton::internal {

class ProgressLock {
 public:
  // `patience`: the longest that way is given at a time.
  explicit ProgressLock(std::chrono::nanoseconds patience = std::chrono::milliseconds(1))
      : patience_(patience) {}

  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  bool wanted() const { return waiting_.load(std::memory_order_relaxed) != 0; }
  // For the thread that takes it over and over, while it does not hold it: lets the current waiter
  // take it first, though not for long.
  void give_way() const {
    if (!wanted()) return;
    const auto end = std::chrono::steady_clock::now() + patience_;
    while (wanted() && std::chrono::steady_clock::now() < end) sched_yield();
  }

 private:
  const std::chrono::nanoseconds patience_;
  std::mutex mutex_;
  std::atomic<int> waiting_{0};
  base::TakenByForks taken_by_forks_{mutex_, waiting_};
};

}  // namespace baton::internal
