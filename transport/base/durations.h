// A moment a while from now, where the while may be longer than there is time.
#pragma once

#include <chrono>

namespace baton::base {

// When `timeout` from `now` on is over. Past the end of time, as of kNever: the greatest moment,
// which is kNever (transport/clock.h). `now` is not negative.
constexpr std::chrono::nanoseconds deadline_after(std::chrono::nanoseconds now,
                                                  std::chrono::nanoseconds timeout) {
  constexpr auto kEnd = std::chrono::nanoseconds::max();
  return timeout < kEnd - now ? now + timeout : kEnd;
}

}  // namespace baton::base
