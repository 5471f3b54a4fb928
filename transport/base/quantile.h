// Quantiles of samples, in the two definitions that the tools which Baton's tables follow use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace baton::base {

// The q-quantile (0 <= q <= 1) of sorted samples by nearest rank, as perftest and nccl-tests have
// it: one of the samples. 0 of none.
inline double sorted_quantile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const double last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(std::lround(std::clamp(q, 0.0, 1.0) * last))];
}

// The same of samples in any order. Takes a copy: it sorts.
inline double quantile(std::vector<double> samples, double q) {
  std::sort(samples.begin(), samples.end());
  return sorted_quantile(samples, q);
}
inline double median(std::vector<double> samples) { return quantile(std::move(samples), 0.5); }

// With linear interpolation between samples, as numpy's and vLLM's benchmarks have it. 0 of none.
inline double interpolated_quantile(std::vector<double> samples, double q) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const double at = q * static_cast<double>(samples.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, samples.size() - 1);
  return samples[low] + (samples[high] - samples[low]) * (at - static_cast<double>(low));
}

}  // namespace baton::base
