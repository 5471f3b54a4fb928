// nccl-tests' table: which sizes a sweep has, and how a row is written.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/nccl_tests/collective_perf_options.h"
#include "bench/report/report.h"

namespace baton::bench {

// One line of the table, before it is measured.
struct CollectivePoint {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  size_t count = 0;         // the call's argument, and the table's column: elements
  size_t in_elements = 0;   // of a rank's input
  size_t out_elements = 0;  // of a rank's output
  size_t bytes = 0;         // the table's column: of the larger of the two
  int root = 0;
};

// Counts are those of nccl-tests: where `bytes` is cut among ranks, each part is a multiple of 16
// bytes.
CollectivePoint point_of(Measured collective, size_t bytes, int ranks, DataType type, ReduceOp op);
std::vector<CollectivePoint> sweep(const CollectivePerfOptions& options, int ranks);

struct Bandwidth {
  double algorithm = 0;  // GB/s: the size by the time
  double bus = 0;        // what each link must have carried, whatever the algorithm
};
Bandwidth bandwidth_of(Measured collective, size_t bytes, int ranks, double seconds);

// How the calls of one measurement spread.
struct IterationStats {
  double min = 0, max = 0, mean = 0, p50 = 0, p95 = 0, p99 = 0, deviation = 0;
  double variation_percent() const { return mean > 0 ? deviation / mean * 100 : 0; }
  static IterationStats of(std::vector<double> samples);
};

// One half of a row: out of place, or in place.
struct PerfHalf {
  double us = 0;  // the time column
  Bandwidth bandwidth;
  std::optional<double> wrong;     // elements, of all ranks; none: not checked
  std::vector<double> slowest_us;  // of each iteration, the rank that took longest
  std::vector<double> average_us;  // of each iteration, over the ranks as -a says
};

struct PerfRow {
  CollectivePoint point;
  std::array<std::optional<PerfHalf>, 2> halves;  // out of place, in place; none: does not exist
};

// The names in the table: "float", "bfloat16"; "sum", or "none" where nothing is combined.
std::string nccl_name(DataType type);
std::string redop_name(const CollectivePerfOptions& options, ReduceOp op);

// A number that fits in `width` by losing its decimals first.
std::string fit(double value, int width);

std::string table_header(const CollectivePerfOptions& options);
std::string table_row(const CollectivePerfOptions& options, const PerfRow& row,
                      const std::string& timestamp);
// `least_bus` is NCCL_TESTS_MIN_BW.
std::string table_footer(const CollectivePerfOptions& options, double wrong, double average_bus,
                         std::optional<double> least_bus);
// True if the footer says FAILED.
bool footer_fails(double wrong, double average_bus, std::optional<double> least_bus);

// The two files that a collective benchmark can write: ours, and nccl-tests' own.

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
