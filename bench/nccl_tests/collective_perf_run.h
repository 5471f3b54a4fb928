// One rank's side of a collective benchmark: buffers, timed calls, checks.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "bench/nccl_tests/collective_perf_table.h"
#include "collectives/communicator.h"

namespace baton::bench {

// Measures every point of the sweep. All ranks call it; all get the same rows. `on_row` is called
// after each. An error is that of the call that failed, after the rows that were done.
absl::Status measure_collectives(const CollectivePerfOptions& options, Communicator& group,
                                 const std::function<void(const PerfRow&)>& on_row);

}  // namespace baton::bench
