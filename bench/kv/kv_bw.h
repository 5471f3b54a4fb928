// `baton kv_bw`: paged transfers between two processes, beside their floor.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "bench/kv/kv_bw_options.h"
#include "bench/report/report.h"

namespace baton::bench {

// Measures each of the options' ops. Transfers and floor take turns, so that both see the same
// moment of the machine; then every byte is checked. Prints nothing. DataLoss where a byte is
// wrong.
absl::StatusOr<std::vector<Row>> measure_kv_bw(const KvBwOptions& options);

// The rows as a table with one line per row, and what to know about each below it.
std::string kv_bw_table(const std::vector<Row>& rows);

// Parses, measures, prints. Returns the exit status: 0, 1 on failure, 2 on bad arguments.
int kv_bw_main(int argc, char** argv);

}  // namespace baton::bench
