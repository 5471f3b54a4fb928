// Measures this machine's peak rates: the roofs that kernels are compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/kernels/compute_pool.h"

namespace baton::engine {

// Floating-point operations per second (2 per lane and fused multiply-add) of all threads of the
// pool, each running `iterations` of a loop over independent register chains.
double measure_fma_peak(ComputePool& pool, int64_t iterations);

// Bytes per second at which the pool's threads read `data` once, in order, in large pieces.
double measure_read_bandwidth(ComputePool& pool, std::span<const std::byte> data);

}  // namespace baton::engine
