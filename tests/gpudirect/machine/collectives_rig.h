// Takes the figures of collectives on memory of a device: both ways of summing, the one that is
// chosen, and NCCL's where it can run. Ranks are threads of this process, on one device, over shm;
// every result is compared.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "tests/gpudirect/machine/transfer_rig.h"

namespace baton::gpudirect {

struct CollectiveSizes {
  size_t bytes = 64 << 20;  // of the vector
  int ranks = 2;
  int rounds = 20;
};

// Blocks. The driver's words where it fails, and DataLoss where a result is wrong.
absl::StatusOr<std::vector<Figure>> take_collective_figures(const CollectiveSizes& sizes);

}  // namespace baton::gpudirect
