// perftest's output: header, columns, rows and JSON report; and Baton's own JSON rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "bench/perftest/perf_client.h"
#include "bench/perftest/perf_options.h"
#include "bench/report/report.h"
#include "transport/clock.h"

namespace baton::bench {

// The facts in the header besides the options.
struct PerfHeader {
  std::string route;
  std::string memory;
};

std::string rule();
std::string header_text(const PerfOptions& options, const PerfHeader& header);
// The line of column heads, and a row below it; both end with a newline.
std::string column_text(const PerfOptions& options);
std::string row_text(const PerfOptions& options, const PerfResult& result);
// With --output: that one number.
std::string single_text(const PerfOptions& options, const PerfResult& result);

// In the units of the table: MiB/s, or Gb/s with --report_gbits.
double in_units(const PerfOptions& options, double bytes_per_s);
// FailedPrecondition when the row is below -w or -y.
absl::Status check_limits(const PerfOptions& options, const PerfResult& result);

// {"test_info": {...}, "results": {...}} with perftest's keys; a list of results where there are
// several.
Json perftest_json(const PerfOptions& options, const PerfHeader& header,
                   const std::vector<PerfResult>& results);
// A house row.
Json row_json(const PerfOptions& options, const PerfHeader& header, const PerfResult& result);

// Latencies in bounded memory: 128 buckets to a power of two, as HdrHistogram has them.
//
// Percentiles are within 0.8 % of the truth, the least and the largest value exact, whatever the
// number of samples; memory is 60 KB.

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
