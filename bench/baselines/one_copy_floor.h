// The floor for all_reduce of two ranks on one machine: a loop that adds straight from the peer's
// memory and copies the other half, with a flag between them and nothing else.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::bench {

// Microseconds of each of `iterations` sums of f32 vectors of `bytes`, by two pinned threads; the
// mean of both. Unavailable where there are not two cores.
absl::StatusOr<std::vector<double>> one_copy_loop(size_t bytes, int iterations, int warmup);

}  // namespace baton::bench
