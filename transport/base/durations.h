// Durations: when one is over, and what system calls take for one.
#pragma once

#include <chrono>
#include <ctime>

namespace baton::base {

// When `timeout` from `now` on is over. Past the end of time, as of kNever: the greatest moment,
// which is kNever (transport/clock.h). `now` is not negative.
constexpr std::chrono::nanoseconds deadline_after(std::chrono::nanoseconds now,
                                                  std::chrono::nanoseconds timeout) {
  constexpr auto kEnd = std::chrono::nanoseconds::max();
  return timeout < kEnd - now ? now + timeout : kEnd;
}

// For ppoll(), nanosleep(). `time` must not be negative.
inline timespec to_timespec(std::chrono::nanoseconds time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  return {.tv_sec = seconds.count(), .tv_nsec = (time - seconds).count()};
}

}  // namespace baton::base
