// Time as a worker sees it: one monotonic clock, real or simulated, and nothing else.
#pragma once

#include <chrono>

namespace baton {

// A point on the worker's clock, as nanoseconds since an arbitrary start. Also used for spans.
using Time = std::chrono::nanoseconds;

constexpr double seconds_of(Time time) { return std::chrono::duration<double>(time).count(); }

inline constexpr Time kNever = Time::max();

namespace base {
// BATON_PATIENCE, a whole number from 1 (the default) to 1,000, read once. For debuggers,
// sanitizers, emulators and machines under heavy load, where a peer that is silent for ten seconds
// is only slow.
int patience_factor();
}  // namespace base

// A default of how long others are waited for, so many times longer. What a caller or a setting
// says holds as it was said.
//
//   Time load_timeout = patient(std::chrono::seconds(5));
template <typename Rep, typename Period>
std::chrono::duration<Rep, Period> patient(std::chrono::duration<Rep, Period> standard) {
  return standard * base::patience_factor();
}

// Source of time. No code in Baton reads the wall clock any other way, so the same code runs in
// virtual time (tests/sim/fabric). Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Time now() const = 0;

  // CLOCK_MONOTONIC of this machine; the same for every process on it.
  static const Clock& steady();
};

}  // namespace baton
