// Durations for system calls that take a timespec: ppoll(), nanosleep().
#pragma once

#include <chrono>
#include <ctime>

namespace baton::base {

// `time` must not be negative.
inline timespec to_timespec(std::chrono::nanoseconds time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  return {.tv_sec = seconds.count(), .tv_nsec = (time - seconds).count()};
}

}  // namespace baton::base
