// perftest's output: header, columns, rows and JSON report; and Baton's own JSON rows.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "bench/perftest/perf_client.h"
#include "bench/perftest/perf_options.h"
#include "bench/report/report.h"

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

}  // namespace baton::bench
