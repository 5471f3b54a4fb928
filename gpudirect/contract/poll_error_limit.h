// How long polling for the end of work may fail, by errors other than the device's loss.
#pragma once

#include <cstdint>

#include "transport/clock.h"

namespace baton::gpudirect {

// Consecutive errors. Until the limit the memory of the work is not given back, since it may still
// be written; without a limit, a driver that never reports the end would block its callers for
// ever.
class PollErrorLimit {
 public:
  void succeeded() { errors_ = 0; }
  // One more error. True: there have been many, for long; stop polling.
  bool reached() {
    const Time now = Clock::steady().now();
    if (errors_++ == 0) first_ = now;
    return errors_ >= kMany && now - first_ >= kLong;
  }

 private:
  static constexpr uint32_t kMany = 1000;
  static constexpr Time kLong = std::chrono::seconds(1);

  uint32_t errors_ = 0;
  Time first_{};
};

}  // namespace baton::gpudirect
