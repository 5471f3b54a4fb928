// The client of the perftest-shaped commands: a connection, a plan, and one measurement per size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/perftest/perf_end.h"
#include "bench/perftest/perf_histogram.h"
#include "bench/perftest/perf_options.h"
#include "bench/perftest/perf_sender.h"
#include "bench/report/dialogue.h"
#include "transport/worker.h"

namespace baton::bench {

// One row. Rates are of both directions together where there are two.
struct PerfResult {
  size_t size = 0;
  uint64_t iterations = 0;  // messages that count
  double seconds = 0;       // in which they ended
  double bytes_per_s = 0;
  double peak_bytes_per_s = 0;  // 0: not measured
  double messages_per_s = 0;
  std::optional<double> other_bytes_per_s;  // bidirectional: the part that the server sent
  Histogram latencies;
  std::optional<bool> verified;  // every byte that lay there in the end was checked
  double cpu_percent = 0;        // of one core
  double server_cpu_percent = 0;
  const char* path = "direct";  // "staged": through pinned memory, where a device's is not reached
  std::string route;            // as it was in the end: a device's memory is mapped when it is used
};

// Not thread-safe. Drives its worker on the calling thread.
class PerfClient {
 public:
  // Told every second of a measurement: the size, seconds so far, messages in the last second.
  using Live = std::function<void(size_t size, double seconds, double messages_per_s)>;
  using Say = std::function<void(const std::string&)>;

  // Connects to `address` (host:port or encoded) and agrees on the plan. `say` gets lines for
  // people ("the server is busy").
  static absl::StatusOr<std::unique_ptr<PerfClient>> open(const PerfOptions& options,
                                                          const std::string& address,
                                                          const Say& say);
  ~PerfClient();
  PerfClient(const PerfClient&) = delete;
  PerfClient& operator=(const PerfClient&) = delete;

  // Measures one size. The first is preceded by a short warm-up. DataLoss when bytes are wrong.
  absl::StatusOr<PerfResult> measure(size_t size, const Live& live);

  std::string route() const { return worker_->explain(peer_); }
  const std::string& backing() const { return end_->backing(); }
  const PerfPlan& plan() const { return plan_; }

 private:
  explicit PerfClient(const PerfOptions& options) : options_(options) {}
  absl::Status agree(const Say& say);
  absl::StatusOr<Json> ask(const Json& question, Time timeout = kAnswerTimeout);
  absl::Status drive(PerfSender& sender, const Live& live);
  absl::StatusOr<PerfResult> run(const PerfRun& run, const Live& live);
  void drain();

  const PerfOptions options_;
  PerfPlan plan_;
  std::unique_ptr<Worker> worker_;
  PeerId peer_;
  std::unique_ptr<PerfEnd> end_;
  std::deque<std::string> control_;
  Notification message_;
  uint64_t seed_ = 1;
  bool warm_ = false;
};

// The plan that the options make.
PerfPlan plan_of(const PerfOptions& options);

// The server of the perftest-shaped commands: serves any of the six tests, one client after the
// other, for as long as it is let. What clients ask for is checked; a bad one gets an answer or is
// forgotten, and the next is served.

struct PerfServerOptions {
  bool once = false;                            // return after the first client has left
  PerfMemory memory;                            // or clients are refused
  std::function<void(const std::string&)> say;  // lines for people; may be empty
};

// On the calling thread, which drives the worker.
absl::Status serve_perf(Worker& worker, const PerfServerOptions& options);

}  // namespace baton::bench
