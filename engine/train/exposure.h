// How much of a trainer's communication was hidden, recomputed from its timeline alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine::train {

// Sums over all ranks (processes) of a trace.
struct Exposure {
  size_t ranks = 0;
  size_t calls = 0;
  uint64_t bytes = 0;
  double communication_us = 0;  // during which at least one call of the rank was in flight
  double exposed_us = 0;        // of that, while the rank waited instead of computing
  double compute_us = 0;

  // 1: all communication was hidden; 0: none was hidden, or there was no communication.
  double efficiency() const { return communication_us > 0 ? 1 - exposed_us / communication_us : 0; }
  std::string to_string() const;  // a few lines for people
};

// Reads Perfetto (Chrome trace event) JSON as `baton train --timeline` writes it: complete events
// ("ph": "X") of category "communication", "wait" and "compute". InvalidArgument for anything else.
absl::StatusOr<Exposure> measure_exposure(std::string_view trace);

// Joins traces of several processes into one. InvalidArgument: a text is not a trace.
absl::StatusOr<std::string> join_traces(const std::vector<std::string>& traces);

}  // namespace baton::engine::train
