// A clock that a test moves by hand. Thread-safe, as every clock is.
#pragma once

#include <atomic>

#include "transport/clock.h"

namespace baton {

class ManualClock final : public Clock {
 public:
  Time now() const override { return Time(now_.load(std::memory_order_relaxed)); }
  void advance(Time by) { now_.fetch_add(by.count(), std::memory_order_relaxed); }

 private:
  std::atomic<Time::rep> now_ = Time(std::chrono::hours(1)).count();
};

}  // namespace baton
