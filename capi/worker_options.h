// Converts the worker options of agents and connectors from C to C++.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "transport/worker.h"

namespace baton::capi {

// NULL or 0: the default.
struct WorkerWords {
  const char* providers;  // with commas between
  const char* require;
  const char* key_file;
  const char* listen_host;
  uint16_t listen_port;
  uint32_t max_transfers;
  const char* settings;  // likewise
  const char* advertise;
};
absl::StatusOr<WorkerOptions> worker_options(const WorkerWords& from);

}  // namespace baton::capi
