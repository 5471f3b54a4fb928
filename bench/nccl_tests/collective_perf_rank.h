// Runs one rank of a collective benchmark, from joining the others to the footer.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/nccl_tests/collective_perf_table.h"
#include "collectives/communicator.h"
#include "collectives/launch.h"

namespace baton::bench {

// Rank 0's results, for writing the files.
struct PerfResults {
  std::vector<Json> rows;  // ours
  Json nccl_json;          // the whole document
};

// Runs one rank; rank 0 prints the table. Returns the exit status: 1 for a wrong value, an error
// (printed to stderr) or too low a bandwidth. `results` is filled at rank 0, also after an error.
int run_perf_rank(const CollectivePerfOptions& options, const std::vector<std::string>& arguments,
                  const launch::Place& place, PerfResults& results);

// Measures every point of the sweep. All ranks call it; all get the same rows. `on_row` is called
// after each. An error is that of the call that failed, after the rows that were done.
absl::Status measure_collectives(const CollectivePerfOptions& options, Communicator& group,
                                 const std::function<void(const PerfRow&)>& on_row);

}  // namespace baton::bench
