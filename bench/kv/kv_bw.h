// `baton kv_bw`: paged transfers between two processes, beside their floor.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "bench/kv/workload.h"
#include "bench/report/report.h"
#include "transport/transfer.h"

namespace baton::bench {

// The command line of `baton kv_bw`.
struct KvBwOptions {
  std::string provider = "shm";
  std::vector<Op> ops = {Op::kWrite};
  WorkloadSpec workload;
  double seconds = 2;    // of transfers, and again of the floor
  size_t transfers = 0;  // so many instead, when > 0
  size_t inflight = 1;   // transfers under way at a time
  std::vector<std::pair<std::string, std::string>> settings;  // for providers
  bool baselines = false;
  bool pin = true;
  std::optional<int> cuda;  // memory of this CUDA device
  std::string json;         // file for the rows; "": none

  std::string host;  // the other side is there, "host:port"; "": in a process of our own
  bool listen = false;
  std::string listen_host;
  std::string advertise;
  uint16_t listen_port = 0;
  bool once = false;

  static constexpr uint16_t kPort = 18516;

  // The value of a provider setting, or `fallback`.
  std::string setting(const std::string& key, std::string fallback) const;
};

// The result of parsing: run with these options, or exit at once with a status; help or the error
// has been printed.
struct KvBwCommand {
  std::optional<KvBwOptions> options;
  int exit_status = 0;
};
KvBwCommand parse_kv_bw(int argc, const char* const* argv);

const char* name_of(Op op);

// Measures each of the options' ops. Transfers and floor take turns, so that both see the same
// moment of the machine; then every byte is checked. Prints nothing. DataLoss where a byte is
// wrong.
absl::StatusOr<std::vector<Row>> measure_kv_bw(const KvBwOptions& options);

// The rows as a table with one line per row, and what to know about each below it.
std::string kv_bw_table(const std::vector<Row>& rows);

// Parses, measures, prints. Returns the exit status: 0, 1 on failure, 2 on bad arguments.
int kv_bw_main(int argc, char** argv);

}  // namespace baton::bench
