// Internal to engine/load: datasets that are files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/workload.h"

namespace baton::engine::load {

void append_random(size_t count, const Words& words, std::mt19937_64& random,
                   std::vector<int32_t>& to);

absl::StatusOr<std::vector<LoadRequest>> read_prompts(const WorkloadOptions& options);
absl::StatusOr<std::vector<LoadRequest>> read_sharegpt(const WorkloadOptions& options,
                                                       const Words& words);
absl::StatusOr<std::vector<LoadRequest>> read_mooncake_trace(const WorkloadOptions& options,
                                                             const Words& words);

}  // namespace baton::engine::load
