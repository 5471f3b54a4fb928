// How long a driver may answer by errors that are no loss, when it is asked whether work is over.
#pragma once

#include <cstdint>

#include "transport/clock.h"

namespace baton::gpudirect {

// Errors one after the other. As long as there is hope the memory of the work is not given back: it
// may still be written. A driver that never says that it is over would keep everybody for ever.
class FailingQuestions {
 public:
  void answered() { errors_ = 0; }
  // One more error. True: there have been many, and for long; nothing else will come.
  bool hopeless() {
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
