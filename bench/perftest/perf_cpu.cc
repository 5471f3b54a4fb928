// Processor time by getrusage().
#include "bench/perftest/perf_cpu.h"

#include <sys/resource.h>

namespace baton::bench {
namespace {

Time span_of(const timeval& tv) {
  return std::chrono::seconds(tv.tv_sec) + std::chrono::microseconds(tv.tv_usec);
}
Time used_so_far() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return span_of(usage.ru_utime) + span_of(usage.ru_stime);
}

}  // namespace

CpuMeter::CpuMeter() : wall_(Clock::steady().now()), used_(used_so_far()) {}

double CpuMeter::percent() const {
  const Time wall = Clock::steady().now() - wall_;
  if (wall <= Time::zero()) return 0;
  return 100.0 * static_cast<double>((used_so_far() - used_).count()) /
         static_cast<double>(wall.count());
}

}  // namespace baton::bench
