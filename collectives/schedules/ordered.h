// Ordered reductions: schedules that carry contributions instead of sums, and combine them once,
// in rank order (Step::kFold). Internal to schedule.cc.
#pragma once

#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

Shape ordered_shape(const ScheduleSpec& spec);
void write_ordered(const ScheduleSpec& spec, uint32_t rank, uint32_t channel, Writer& w);

}  // namespace baton::collectives::schedules
