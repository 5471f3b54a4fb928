// The real clock: CLOCK_MONOTONIC.
#include "transport/clock.h"

namespace baton {
namespace {

class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
};

// There before any code runs: a child that is forked while another thread makes it at its first use
// would wait for that thread for ever.
constinit const SteadyClock kSteady;

}  // namespace

const Clock& Clock::steady() { return kSteady; }

}  // namespace baton
