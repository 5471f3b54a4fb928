// The costs of combining vectors by the kernel on a device, for each element type.
#pragma once

#include <array>

#include "absl/status/statusor.h"
#include "gpudirect/device.h"
#include "gpudirect/kernels/arguments.h"
#include "gpudirect/launcher.h"

namespace baton::gpudirect {

// In nanoseconds.
struct SumCosts {
  std::array<double, kernels::kSumElements> start{};  // of one launch, until its end is seen
  std::array<double, kernels::kSumElements> byte{};   // for each byte of every source
  double host_copy = 0;                               // by the CPU, for each byte
};

// Blocks that suit vectors of so many bytes.
constexpr uint64_t sum_blocks(size_t bytes) { return bytes / 16 / 256 + 1; }

// By trying, in some milliseconds of the device's time: two vectors of `bytes`, the shortest of
// some tries. Blocks.
absl::StatusOr<SumCosts> measure_sums(const Device& device, const Launcher& launcher,
                                      size_t bytes = 4 << 20, int tries = 3);

}  // namespace baton::gpudirect
