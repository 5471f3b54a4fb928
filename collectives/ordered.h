// Ordered reductions: schedules that carry contributions instead of sums, and combine them once,
// in rank order (Step::kFold). Internal to schedule.cc.
#pragma once

#include "collectives/algorithms/algorithms.h"

namespace baton::collectives {

// True if this reduction has an ordered form with this algorithm.
bool has_ordered_form(Collective collective, Algorithm algorithm);
Shape ordered_shape(const ScheduleSpec& spec);
void write_ordered(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);

}  // namespace baton::collectives
