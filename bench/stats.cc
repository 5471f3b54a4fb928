// Medians and percentiles of measured samples.
#include "bench/stats.h"

#include <algorithm>
#include <cmath>

namespace baton::bench {
namespace {

double rank(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const double last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(std::lround(std::clamp(q, 0.0, 1.0) * last))];
}

}  // namespace

double quantile(std::vector<double> samples, double q) {
  std::sort(samples.begin(), samples.end());
  return rank(samples, q);
}

Latency Latency::of(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  return {.p50 = rank(microseconds, 0.5),
          .p90 = rank(microseconds, 0.9),
          .p99 = rank(microseconds, 0.99),
          .p999 = rank(microseconds, 0.999),
          .max = rank(microseconds, 1)};
}

Rate Rate::of(const std::vector<double>& samples) {
  if (samples.empty()) return {};
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
  return {.median = bench::median(samples), .min = *least, .max = *most, .samples = samples.size()};
}

}  // namespace baton::bench
