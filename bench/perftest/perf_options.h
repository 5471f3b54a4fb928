// The command line of `baton write_bw` and its five sisters: perftest's flags, and our own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/perftest/perf_plan.h"

namespace baton::bench {

struct PerfOptions {
  static constexpr uint16_t kPort = 18515;
  static constexpr double kMargin = 2;

  PerfTest test;

  // Where and how. No host: a server, unless `loopback` runs both sides here.
  std::string provider;  // "": verbs for a client, all there are for a server
  std::string host;      // "host:port" to connect to
  std::string listen = "*";
  uint16_t port = kPort;
  bool keep = false;  // the server goes on after its client
  bool loopback = false;
  bool pin = true;
  std::vector<std::pair<std::string, std::string>> settings;  // for providers
  std::string device;                                         // as given with -d
  std::optional<uint64_t> gid_index, mtu, inline_size, cq_mod, outs;
  uint64_t streams = 1;
  bool huge_pages = false;
  std::optional<int> cuda;  // memory of this CUDA device
  bool dma_buf = false;     // reached by the adapter itself, or an error
  bool dual_port = false;   // two ports of one device

  // The traffic.
  std::vector<size_t> sizes;
  uint64_t iterations = 0;
  double duration = 0;  // seconds for each size, instead of iterations
  double margin = 0;
  bool endless = false;
  size_t depth = 0;
  size_t post_list = 1;
  size_t receives = 512;  // of send_bw, open at the receiver
  bool bidirectional = false;
  bool events = false;
  bool immediate = false;
  bool cold = false;
  bool verify = true;
  bool peak = true;

  // The report.
  bool gbits = false;
  bool cpu = false;
  bool live = false;
  std::optional<double> limit_bw, limit_msgrate;  // in the units of the table
  std::string output;                             // "": the whole table
  std::string json;                               // house rows
  std::string out_json;                           // perftest's report
  std::vector<std::string> notes;                 // for people: what was made of the arguments

  bool server() const { return host.empty() && !loopback; }
  std::string client_provider() const { return provider.empty() ? "verbs" : provider; }
};

// The result of parsing: run with these options, or exit at once with a status; help or the error
// has been printed. argv[0] is the name of the test.
struct PerfCommand {
  std::optional<PerfOptions> options;
  int exit_status = 0;
};
PerfCommand parse_perf(const PerfTest& test, int argc, const char* const* argv);

// A flag that perftest has and these commands do not: what to use instead. Empty for a flag that
// perftest does not have either.
std::string instead_of(const std::string& flag);

// argv[0] is the name of the test. Exit status: 0, 1 when the test fails or is below a limit, 2 for
// bad arguments.
int perf_main(int argc, char** argv);

}  // namespace baton::bench
