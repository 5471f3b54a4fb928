// The processor time that this process takes, as a share of one core.
#pragma once

#include "transport/clock.h"

namespace baton::bench {

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
