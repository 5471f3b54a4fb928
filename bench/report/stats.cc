// Medians and percentiles of measured samples.
#include "bench/report/stats.h"

#include <algorithm>
#include <cmath>

namespace baton::bench {
Latency Latency::of(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  return {.p50 = base::sorted_quantile(microseconds, 0.5),
          .p90 = base::sorted_quantile(microseconds, 0.9),
          .p99 = base::sorted_quantile(microseconds, 0.99),
          .p999 = base::sorted_quantile(microseconds, 0.999),
          .max = base::sorted_quantile(microseconds, 1)};
}

Rate Rate::of(const std::vector<double>& samples) {
  if (samples.empty()) return {};
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
  return {.median = baton::base::median(samples),
          .min = *least,
          .max = *most,
          .samples = samples.size()};
}

}  // namespace baton::bench
