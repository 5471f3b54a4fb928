// Time for measurements: the processor's cycle counter, where it keeps time.
//
// Two readings belong to every latency that is measured, so they are part of it. perftest reads the
// cycle counter, and numbers beside its own have to be taken the same way. It matters most where
// the kernel's clock is a device and not that counter, as in many virtual machines: then asking for
// the time is a system call. In an emulated machine (./run softroce) with its clock source set to
// hpet or acpi_pm one reading took 1.5 to 4.5 us, with tsc 0.1 us, and of the counter itself 0.03
// to 0.2 us; a whole write_lat takes about 11 us there.
#pragma once

#include "transport/clock.h"

namespace baton::bench {

// Since an arbitrary moment; only differences mean anything. Clock::steady() where there is no
// counter, or where it does not agree with that clock within 1 %, which the first call takes 10 ms
// to find out. Any thread.
Time fast_now();

// The processor time that this process takes, as a share of one core.
class CpuMeter {
 public:
  CpuMeter();
  // Since it was made.
  double percent() const;

 private:
  Time wall_;
  Time used_;
};

}  // namespace baton::bench
