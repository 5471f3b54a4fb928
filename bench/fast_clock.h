// Time for measurements: the processor's cycle counter where it keeps time, because on machines
// whose clock is a device (many virtual ones) reading that costs more than what is measured.
#pragma once

#include "transport/clock.h"

namespace baton::bench {

// Since an arbitrary moment; only differences mean anything. The first call takes 10 ms. Any
// thread.
Time fast_now();

}  // namespace baton::bench
