// The real clock: CLOCK_MONOTONIC.
#include "transport/clock.h"

namespace baton {
namespace {

class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
};

// Initialised at compile time: with initialisation at first use, a child forked meanwhile would
// wait without end for the parent's thread.
constinit const SteadyClock kSteady;

}  // namespace

const Clock& Clock::steady() { return kSteady; }

}  // namespace baton
