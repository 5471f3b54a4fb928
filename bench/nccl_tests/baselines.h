// Baselines for the same job: other libraries' collectives, run beside ours at the same sizes.
#pragma once

#include <string>
#include <vector>

#include "bench/nccl_tests/collective_perf_options.h"
#include "bench/report/report.h"

namespace baton::bench {

// The times of one baseline, by point of the sweep.
struct BaselineResult {
  std::string name;               // "open_mpi_shm"
  std::vector<double> median_us;  // 0: it does not do this size
};

struct BaselineReport {
  std::vector<BaselineResult> baselines;
  std::vector<std::string> missing;  // why some are not there, and what to do about it
};

// Runs every baseline that suits the options (shm ones unless the provider is tcp, and so on) on
// `ranks` processes, one after the other. `counts` are the points of ours.
BaselineReport run_baselines(const CollectivePerfOptions& options, int ranks, DataType type,
                             ReduceOp op, const std::vector<size_t>& counts);

// Adds each baseline's time and the ratio to the matching house rows (out of place, or where only
// that exists, in place), and returns a table of medians for people.
std::string join_baselines(const BaselineReport& report, const std::vector<size_t>& counts,
                           std::vector<Json>& rows);

}  // namespace baton::bench
