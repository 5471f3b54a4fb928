// Measuring what links and reductions cost, once, when a communicator starts.
#pragma once

#include "absl/status/statusor.h"
#include "collectives/internal/call_starter.h"
#include "collectives/internal/driver.h"
#include "collectives/internal/mesh.h"
#include "collectives/prediction/cost_model.h"

namespace baton::collectives::internal {

struct MeasuredCosts {
  prediction::CostParameters parameters;  // the same at all ranks
  // This rank overwrites what a peer has just read in place faster past the caches.
  bool stream_over_read = false;
};

// Takes under 100 ms. All ranks call it together, without the lock: it makes calls. Parameters that
// could not be measured are those of `before`.
absl::StatusOr<MeasuredCosts> measure_costs(Mesh& mesh, CallStarter& calls, Driver& driver,
                                            size_t slot_bytes,
                                            const prediction::CostParameters& before);

}  // namespace baton::collectives::internal
