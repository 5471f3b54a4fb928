// A clock that a test moves by hand.
#pragma once

#include "transport/clock.h"

namespace baton {

class ManualClock final : public Clock {
 public:
  Time now() const override { return now_; }
  void advance(Time by) { now_ += by; }

 private:
  Time now_ = std::chrono::hours(1);
};

}  // namespace baton
