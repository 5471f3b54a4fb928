// Medians and percentiles of measured samples.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/base/quantile.h"

namespace baton::bench {

// What a latency looks like, in microseconds.
struct Latency {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double p999 = 0;
  double max = 0;

  static Latency of(std::vector<double> microseconds);
};

// A rate that was measured several times.
struct Rate {
  double median = 0;
  double min = 0;
  double max = 0;
  size_t samples = 0;

  static Rate of(const std::vector<double>& samples);
};

}  // namespace baton::bench
