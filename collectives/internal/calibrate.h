// Measuring what links and reductions cost, once, when a communicator starts.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/executor/memory.h"
#include "collectives/prediction/cost_model.h"
#include "transport/clock.h"

namespace baton::collectives::internal {

// The parts of the communicator that measuring needs.
struct Calibration {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  uint32_t node_size = 1;
  size_t slot_bytes = 0;
  bool shares_cores = false;  // with other ranks, here; need not be equal everywhere
  executor::Memory* memory = nullptr;
  const Clock* clock = nullptr;
  // Sends to `other` or receives from it, and waits.
  std::function<absl::Status(bool sends, std::byte* data, size_t bytes, uint32_t other)> exchange;
  // Sums a few bytes by this algorithm, and waits.
  std::function<absl::Status(Algorithm)> sum;
  // Gathers `mine` of all ranks, in their order, in `all`.
  std::function<absl::Status(const std::string& mine, char* all)> gather;
};

struct MeasuredCosts {
  prediction::CostParameters parameters;  // the same at all ranks
  // This rank overwrites what a peer has just read in place faster past the caches.
  bool stream_over_read = false;
};

// Takes under 100 ms. All ranks call it together. Parameters that could not be measured are those
// of `before`.
absl::StatusOr<MeasuredCosts> measure_costs(const Calibration& with,
                                            const prediction::CostParameters& before);

}  // namespace baton::collectives::internal
