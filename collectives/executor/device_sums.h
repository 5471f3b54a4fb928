// Sums of calls on memory of devices: by a kernel of the device, or by the CPU that drives the
// executor. What either way costs is measured; prices() says what a call would pay.
//
// A sum by a kernel is begun and asked for, so that a lane waits for it as for a message. Its
// vectors are brought onto the device by copy engines, except the part of the call's own input that
// is there already; the result comes back to the host's memory, where the schedule wants it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/executor/geometry.h"
#include "collectives/executor/memory.h"
#include "collectives/executor/prepared.h"
#include "collectives/types.h"
#include "transport/internal/device_memory.h"

namespace baton::collectives::executor {

// True if the kernels support this combination; the CPU supports all.
bool kernel_combines(DataType type, ReduceOp op);
baton::internal::VectorSum::Element element_of(DataType type);
baton::internal::VectorSum::Operation operation_of(ReduceOp op);

// The input of a call on a device, and the executor's copy of it.
struct DeviceInput {
  const std::byte* device = nullptr;  // an address that the CPU must not follow
  const std::byte* host = nullptr;
  size_t bytes = 0;
};

// Predicted seconds of one rank's sums in one call. The prediction adds them up, although lanes
// overlap them and the CPU moves messages while a kernel sums.
struct SumPrices {
  size_t sums = 0;
  size_t most_sources = 0;
  double by_cpu = 0;
  double by_kernel = 0;
};

// The sums of one device for one executor. Not thread-safe: the communicator guards it.
class DeviceSums {
 public:
  static constexpr size_t kMostSources = baton::internal::VectorSums::kMostSources;

  // `memory` outlives this: what the executor has of it is pinned as it comes up.
  DeviceSums(std::unique_ptr<baton::internal::VectorSums> kernel, const Memory& memory)
      : kernel_(std::move(kernel)), memory_(memory) {}

  // Prices for a call whose pieces run these programs, by channel, in turn. `in_place`: the ranks
  // whose messages are read in their own memory, which cannot be pinned here.
  SumPrices prices(const std::vector<PreparedProgram>& programs, const Geometry& geometry,
                   DataType type, ReduceOp op, const std::vector<bool>& in_place,
                   bool input_on_device);

  // Begins target = sources[0] (+) sources[1] (+) ... for a lane that has no sum under way.
  // `original`: which of the sources is what the call has read, unchanged, so that it can be taken
  // from the device; SIZE_MAX: none. All stays as it is until the sum has ended.
  absl::Status begin(uint32_t lane, DataType type, ReduceOp op, std::byte* target,
                     absl::Span<const void* const> sources, size_t count, uint32_t divide_by,
                     const DeviceInput& input, size_t original);
  // How the lane's sum ended; nothing as long as it runs.
  std::optional<absl::Status> ended(uint32_t lane) { return kernel_->ended(lane); }
  // Waits for all sums: after it returns none of them touches memory.
  void stop();
  // For sums of no lane: slots from kLanes on.
  baton::internal::VectorSums& kernel() { return *kernel_; }

 private:
  struct Priced {
    const void* programs = nullptr;
    size_t count = 0, part_elements = 0;
    DataType type{};
    ReduceOp op{};
    bool input_on_device = false;
    bool operator==(const Priced&) const = default;
  };
  double cpu_seconds_per_byte(DataType type);
  void pin_new_regions();

  const std::unique_ptr<baton::internal::VectorSums> kernel_;
  const Memory& memory_;
  size_t pinned_ = 0;  // regions of `memory_`
  std::vector<baton::internal::VectorSum::Source> sources_;
  Priced priced_;  // the last call: most are like the one before
  SumPrices prices_;
  std::array<std::optional<double>, kDataTypes> cpu_{};  // measured when first asked for
};

}  // namespace baton::collectives::executor
