// The perftest-shaped commands: runs server, client or both, and prints the results.

#include <unistd.h>

#include <csignal>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "bench/perftest/perf_client.h"
#include "bench/perftest/perf_options.h"
#include "bench/perftest/perf_output.h"
#include "bench/report/child_process.h"
#include "engine/files/files.h"
#include "transport/address.h"

namespace baton::bench {
namespace {

constexpr const char* kReady = "ready ";
const Time kStartTimeout = patient(std::chrono::seconds(15));

volatile sig_atomic_t interrupted = 0;

int fail(const PerfOptions& options, const absl::Status& status) {
  std::cout << std::flush;
  std::cerr << "baton " << options.test.name() << ": " << status.message() << "\n";
  return 1;
}

WorkerOptions server_options(const PerfOptions& options) {
  WorkerOptions out;
  out.name = "baton-perf-server";
  out.listen_host = options.listen;
  out.listen_port = options.port;
  out.settings = options.settings;
  out.max_transfers = 4096 + 3 * PerfPlan::kMaxDepth;  // one peer has a third with notifications
  if (!options.provider.empty()) {
    out.providers = {options.provider};
    if (options.provider != "tcp") out.providers.emplace_back("tcp");  // answers host:port
  }
  return out;
}

int run_server(const PerfOptions& options) {
  if (absl::Status there = device_is_there(options.cuda); !there.ok()) return fail(options, there);
  const auto worker = Worker::create(server_options(options));
  if (!worker.ok()) return fail(options, worker.status());
  std::vector<std::string> providers;
  if (const auto address = Address::decode((*worker)->address()); address.ok()) {
    for (const auto& [name, where] : address->providers) providers.push_back(name);
  }
  const std::string stars(36, '*');
  std::cout << "\n"
            << stars << "\n* Waiting for client to connect... *\n"
            << stars << "\n"
            << absl::StrFormat("listening on %s:%d by %s%s", options.listen, (*worker)->port(),
                               absl::StrJoin(providers, ", "),
                               options.keep ? "; Ctrl-C ends it" : "; exits after one client")
            << std::endl;
  const absl::Status status = serve_perf(
      **worker, {.once = !options.keep,
                 .memory = {.huge_pages = options.huge_pages, .device = options.cuda},
                 .say = [](const std::string& line) { std::cout << line << std::endl; }});
  return status.ok() ? 0 : fail(options, status);
}

// The server of --loopback, in a child.
int run_child_server(const PerfOptions& options, int out) {
  WorkerOptions mine = server_options(options);
  mine.listen_host = "127.0.0.1";
  mine.listen_port = 0;
  mine.providers = {options.client_provider()};
  const auto worker = Worker::create(std::move(mine));
  const std::string text =
      (worker.ok() ? kReady + (*worker)->address() : std::string(worker.status().message())) + "\n";
  [[maybe_unused]] const ssize_t put = write(out, text.data(), text.size());
  if (!worker.ok()) return 1;
  const PerfMemory memory{.huge_pages = options.huge_pages, .device = options.cuda};
  return serve_perf(**worker, {.once = true, .memory = memory, .say = {}}).ok() ? 0 : 1;
}

// Prints rows and keeps the files up to date, so that what was measured is never lost.
class Reporter {
 public:
  Reporter(const PerfOptions& options, PerfHeader header)
      : options_(options), header_(std::move(header)) {
    if (!options_.output.empty()) return;
    std::cout << header_text(options_, header_) << column_text(options_) << std::flush;
  }

  ~Reporter() {
    if (const absl::Status late = write_streams(); !late.ok()) fail(options_, late);
  }
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  absl::Status add(const PerfResult& result) {
    if (!options_.output.empty()) {
      std::cout << single_text(options_, result) << std::flush;
    } else {
      std::cout << row_text(options_, result) << std::flush;
    }
    if (!options_.json.empty()) lines_.push_back(row_json(options_, header_, result));
    if (!options_.out_json.empty()) results_.push_back(result);
    if (absl::Status status = write(true); !status.ok()) return status;
    if (absl::Status limit = check_limits(options_, result); !limit.ok() && limit_.ok()) {
      limit_ = limit;
    }
    return absl::OkStatus();
  }

  absl::Status finish() {
    if (options_.output.empty()) std::cout << rule() << std::flush;
    if (absl::Status status = write_streams(); !status.ok()) return status;
    return limit_;
  }

 private:
  // Files that are replaced (`replaced`), or devices and FIFOs, which are written to but once.
  absl::Status write(bool replaced) {
    absl::Status status;
    if (!lines_.empty() && engine::is_replaced(options_.json) == replaced) {
      status = write_lines(options_.json, lines_);
    }
    if (!results_.empty() && engine::is_replaced(options_.out_json) == replaced) {
      status.Update(write_text(options_.out_json,
                               dump(perftest_json(options_, header_, results_), 2) + "\n",
                               "--out_json_file"));
    }
    return status;
  }
  absl::Status write_streams() {
    if (std::exchange(streams_written_, true)) return absl::OkStatus();
    return write(false);
  }

  const PerfOptions& options_;
  const PerfHeader header_;
  std::vector<Json> lines_;
  std::vector<PerfResult> results_;
  absl::Status limit_;
  bool streams_written_ = false;
};

// A line on stderr every second, rewritten in place on a terminal.
PerfClient::Live live_line(const PerfOptions& options) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (!options.live && (!terminal || !options.output.empty())) return nullptr;
  return [&options, terminal](size_t size, double seconds, double messages_per_s) {
    const double bytes_per_s = messages_per_s * static_cast<double>(size);
    std::cerr << absl::StrFormat("%s %d bytes, %.0f s: %.2f %s, %.6f Mpps%s", terminal ? "\r" : "",
                                 size, seconds, in_units(options, bytes_per_s),
                                 options.gbits ? "Gb/sec" : "MiB/sec", messages_per_s * 1e-6,
                                 terminal ? "\033[K\r" : "\n")
              << std::flush;
  };
}

int run_client(const PerfOptions& options, const std::string& address) {
  const auto say = [&](const std::string& line) {
    std::cerr << "baton " << options.test.name() << ": " << line << std::endl;
  };
  const auto client = PerfClient::open(options, address, say);
  if (!client.ok()) return fail(options, client.status());
  if (options.endless) {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = 1; };
    sigaction(SIGINT, &action, nullptr);
  }
  Reporter reporter(options, {.route = (*client)->route(), .memory = (*client)->backing()});
  const PerfClient::Live live = live_line(options);
  do {
    for (const size_t size : options.sizes) {
      const auto result = (*client)->measure(size, live);
      if (!result.ok()) return fail(options, result.status());
      if (absl::Status status = reporter.add(*result); !status.ok()) return fail(options, status);
    }
  } while (options.endless && interrupted == 0);
  const absl::Status limits = reporter.finish();
  return limits.ok() ? 0 : fail(options, limits);
}

int run_both(const PerfOptions& options) {
  const std::vector<int>& cpus = allowed_cpus();
  const bool pin = options.pin && cpus.size() >= 2;
  auto child = ChildProcess::fork(pin ? cpus[1] : -1,
                                  [&](int out) { return run_child_server(options, out); });
  if (!child.ok()) return fail(options, child.status());
  const auto line = child->read_line(kStartTimeout);
  if (!line.ok()) return fail(options, line.status());
  if (line->compare(0, strlen(kReady), kReady) != 0) {
    const bool tcp = options.client_provider() == "tcp";
    return fail(options, absl::UnavailableError(
                             absl::StrCat(*line, tcp ? "" : "; --provider tcp works everywhere")));
  }
  if (pin) pin_to(cpus[0]);
  const int status = run_client(options, line->substr(strlen(kReady)));
  if (status == 0) child->wait(std::chrono::seconds(5)).IgnoreError();
  return status;
}

}  // namespace

int perf_main(int argc, char** argv) {
  const auto test = PerfTest::named(argc > 0 ? argv[0] : "");
  if (!test.has_value()) return 2;
  const PerfCommand command = parse_perf(*test, argc, argv);
  if (!command.options.has_value()) return command.exit_status;
  const PerfOptions& options = *command.options;
  if (options.server()) return run_server(options);
  return options.loopback ? run_both(options) : run_client(options, options.host);
}

}  // namespace baton::bench
