// The two files that a collective benchmark can write: ours, and nccl-tests' own.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/nccl_tests/collective_perf_table.h"
#include "bench/report/report.h"

namespace baton::bench {

// One object per half of the row, as every command of `baton` writes them.
std::vector<Json> house_rows(const CollectivePerfOptions& options, int ranks,
                             const std::string& route, const PerfRow& row);

// A rank, for nccl-tests' list of devices.
struct RankInfo {
  int rank = 0;
  int pid = 0;
  std::string host;
  std::string device;  // what stands where nccl-tests names the GPU
};

// One entry of nccl-tests' "results".
Json nccl_result(const CollectivePerfOptions& options, const PerfRow& row);

// nccl-tests' whole document (its version 3).
struct NcclDocument {
  std::vector<std::string> arguments;
  std::vector<std::string> environment;
  std::string start_time;
  std::string end_time;
  std::vector<RankInfo> ranks;
  Json results = Json::array();
  double wrong = 0;
  bool whole = true;  // false: an error ended it
  double average_bus = 0;
  std::optional<double> least_bus;
};
Json nccl_json(const CollectivePerfOptions& options, const NcclDocument& document);

// Writes to a file that does not exist yet: `path`, or as nccl-tests does `path`.0, .1, ...; says
// which. A device or a FIFO is written to.
absl::StatusOr<std::string> write_new_file(const std::string& path, const Json& json);

}  // namespace baton::bench
