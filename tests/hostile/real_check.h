// What must hold of a schedule of real faults when its processes are gone.
#pragma once

#include "tests/hostile/real_schedule.h"
#include "tests/seeds.h"

namespace baton {

// Fails the test where a transfer ended wrongly: twice, with bytes missing or moved since, or in a
// way that nobody asked for. `dead`: the side that was killed; 2: neither. 1 if it was done, else
// 0.
size_t check_real_item(const RealSchedule& schedule, size_t number, size_t dead);

}  // namespace baton
