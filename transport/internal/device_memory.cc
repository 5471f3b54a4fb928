// The device provider of this process, and what the CPU knows of device memory.
#include "transport/internal/device_memory.h"

#include <atomic>

#include "absl/strings/str_format.h"

namespace baton {

std::string MemoryPlace::name() const {
  if (kind == MemoryKind::kHost) return "the host";
  return device < 0 ? "a device" : absl::StrFormat("CUDA device %d", device);
}

namespace internal {
namespace {

std::atomic<const DeviceMemory*> driver_of_devices{nullptr};

}  // namespace

void use_device_memory(const DeviceMemory* memory) { driver_of_devices.store(memory); }
const DeviceMemory* device_memory() { return driver_of_devices.load(); }

absl::Status touched_by_cpu(std::string_view provider, const RegionEntry& region) {
  if (region.place.kind == MemoryKind::kHost) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "%s moves bytes by the CPU, which cannot touch memory of %s: use a route that can (verbs, "
      "with a dma-buf), or copy to registered host memory first",
      provider, region.place.name()));
}

}  // namespace internal
}  // namespace baton
