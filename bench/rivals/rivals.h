// Who else does the same job: other libraries' collectives, run beside ours at the same sizes.
#pragma once

#include <string>
#include <vector>

#include "bench/collective_perf_options.h"
#include "bench/report.h"

namespace baton::bench {

// What one rival took, by point of the sweep.
struct RivalResult {
  std::string name;               // "open_mpi_shm"
  std::vector<double> median_us;  // 0: it does not do this size
};

struct RivalReport {
  std::vector<RivalResult> rivals;
  std::vector<std::string> missing;  // why some are not there, and what to do about it
};

// Runs every rival that suits the options (shm ones unless the provider is tcp, and so on) on
// `ranks` processes, one after the other. `counts` are the points of ours.
RivalReport run_rivals(const CollectivePerfOptions& options, int ranks, DataType type, ReduceOp op,
                       const std::vector<size_t>& counts);

// Adds each rival's time and the ratio to the matching house rows (out of place, or where only that
// exists, in place), and returns a table of medians for people.
std::string join_rivals(const RivalReport& report, const std::vector<size_t>& counts,
                        std::vector<Json>& rows);

}  // namespace baton::bench
