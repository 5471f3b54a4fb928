// Calibrates the cycle counter, twice, and uses it if the two agree.
#include "bench/report/fast_clock.h"

#include <sys/resource.h>

#include <cmath>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace baton::bench {

#if defined(__x86_64__)
namespace {

struct Calibration {
  uint64_t begin = 0;
  double ns_per_cycle = 0;  // 0: not to be used
};

double measure(Time length) {
  const Clock& clock = Clock::steady();
  const Time from = clock.now();
  const uint64_t cycles = __rdtsc();
  Time to = from;
  while (to - from < length) to = clock.now();
  return static_cast<double>((to - from).count()) / static_cast<double>(__rdtsc() - cycles);
}

Calibration calibrate() {
  constexpr double kAgreement = 0.01;
  const double first = measure(std::chrono::milliseconds(5));
  const double second = measure(std::chrono::milliseconds(5));
  if (!(std::abs(first - second) < kAgreement * second)) return {};
  return {__rdtsc(), (first + second) / 2};
}

}  // namespace

Time fast_now() {
  static const Calibration calibration = calibrate();
  if (calibration.ns_per_cycle == 0) return Clock::steady().now();
  const auto cycles = static_cast<double>(__rdtsc() - calibration.begin);
  return Time(static_cast<Time::rep>(cycles * calibration.ns_per_cycle));
}
#else
Time fast_now() { return Clock::steady().now(); }
#endif

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
