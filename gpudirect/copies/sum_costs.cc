// Times the kernel that combines vectors, and the CPU's copies.
#include "gpudirect/copies/sum_costs.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <vector>

#include "gpudirect/device_memory.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kSmall = 4096;
constexpr std::chrono::seconds kSumPatience{2};
using Steady = std::chrono::steady_clock;

double nanoseconds_since(Steady::time_point begin) {
  return std::chrono::duration<double, std::nano>(Steady::now() - begin).count();
}

class SumMeasurement {
 public:
  SumMeasurement(const Device& device, const Launcher& launcher, DevicePointer at, size_t bytes)
      : device_(device), launcher_(launcher), at_(at), bytes_(bytes) {}

  // The shortest of some sums of two vectors of so many bytes.
  absl::StatusOr<double> time(kernels::SumElement element, size_t bytes, int tries) const {
    constexpr std::array<size_t, kernels::kSumElements> kSizes = {4, 2, 2, 8, 1, 1, 4, 8};
    kernels::ReduceSum sum{.target = pointer_of<void>(at_),
                           .count = bytes / kSizes[static_cast<size_t>(element)],
                           .source_count = 2,
                           .element = element};
    sum.sources[0] = sum.target;
    sum.sources[1] = pointer_of<void>(at_ + bytes_);
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < tries; ++i) {
      const auto begin = Steady::now();
      absl::Status status = launcher_.reduce_sum(sum, sum_blocks(bytes), stream());
      if (status.ok()) status = wait();
      if (!status.ok()) return status;
      least = std::min(least, nanoseconds_since(begin));
    }
    return least;
  }

  absl::Status wait() const {
    const auto begin = Steady::now();
    while (true) {
      const Result result = device_.driver().cuStreamQuery(stream());
      if (result != kNotReady) return device_.check(result, "waiting for a sum");
      if (Steady::now() - begin > kSumPatience) {
        return absl::DeadlineExceededError("a sum of two small vectors has not ended in 2 s");
      }
    }
  }

 private:
  Stream stream() const { return device_.stream(Direction::kBetween); }

  const Device& device_;
  const Launcher& launcher_;
  const DevicePointer at_;
  const size_t bytes_;
};

double host_copy(size_t bytes, int tries) {
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes);
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < tries; ++i) {
    const auto begin = Steady::now();
    std::memcpy(to.data(), from.data(), bytes);
    least = std::min(least, nanoseconds_since(begin));
  }
  return least / static_cast<double>(bytes);
}

}  // namespace

absl::StatusOr<SumCosts> measure_sums(const Device& device, const Launcher& launcher, size_t bytes,
                                      int tries) {
  const auto slab = DeviceSlab::create(device, 2 * bytes, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  const SumMeasurement measurement(device, launcher, (*slab)->span().data, bytes);
  SumCosts costs;
  for (size_t i = 0; i < kernels::kSumElements; ++i) {
    const auto element = static_cast<kernels::SumElement>(i);
    const auto small = measurement.time(element, kSmall, tries);
    const auto large = small.ok() ? measurement.time(element, bytes, tries) : small;
    if (!large.ok()) {
      // Work that was queued before an error may still use the memory.
      measurement.wait().IgnoreError();
      return large.status();
    }
    costs.byte[i] = std::max(0.0, (*large - *small) / static_cast<double>(2 * (bytes - kSmall)));
    costs.start[i] = *small;
  }
  costs.host_copy = host_copy(bytes, tries);
  return costs;
}

}  // namespace baton::gpudirect
