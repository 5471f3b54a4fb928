// Latencies in bounded memory: 128 buckets to a power of two, as HdrHistogram has them.
//
// Percentiles are within 0.8 % of the truth, the least and the largest value exact, whatever the
// number of samples; memory is 60 KB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bench/report/report.h"
#include "transport/clock.h"

namespace baton::bench {

class Histogram {
 public:
  Histogram();

  void record(Time value);  // negative values count as 0
  void clear();

  uint64_t count() const { return count_; }
  Time min() const { return count_ == 0 ? Time(0) : Time(min_); }
  Time max() const { return Time(max_); }
  double mean_us() const;
  double stdev_us() const;  // of the population
  // The q-quantile (0 <= q <= 1) by nearest rank: the middle of its bucket, in [min, max].
  Time quantile(double q) const;
  double quantile_us(double q) const;
  Latency summary() const;  // microseconds

 private:
  std::vector<uint64_t> buckets_;
  uint64_t count_ = 0;
  int64_t min_ = INT64_MAX;
  int64_t max_ = 0;
  double mean_ = 0;     // nanoseconds, by Welford
  double squares_ = 0;  // sum of squared distances from the mean
};

}  // namespace baton::bench
