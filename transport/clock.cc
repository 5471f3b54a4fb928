// The real clock: CLOCK_MONOTONIC.
#include "transport/clock.h"

namespace baton {
namespace {

class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
};

}  // namespace

const Clock& Clock::steady() {
  static const SteadyClock clock;
  return clock;
}

}  // namespace baton
