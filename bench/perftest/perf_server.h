// The server of the perftest-shaped commands: serves any of the six tests, one client after the
// other, for as long as it is let. What clients ask for is checked; a bad one gets an answer or is
// forgotten, and the next is served.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "bench/perftest/perf_end.h"
#include "transport/worker.h"

namespace baton::bench {

struct PerfServerOptions {
  bool once = false;                            // return after the first client has left
  PerfMemory memory;                            // or clients are refused
  std::function<void(const std::string&)> say;  // lines for people; may be empty
};

// On the calling thread, which drives the worker.
absl::Status serve_perf(Worker& worker, const PerfServerOptions& options);

}  // namespace baton::bench
