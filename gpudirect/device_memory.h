// Memory of a CUDA device: slabs of our own, and what can be said of anybody's.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/device.h"

namespace baton::gpudirect {

// A range of device memory. An address that the CPU must not follow.
struct DeviceSpan {
  DevicePointer data = 0;
  size_t size = 0;
};

struct SlabOptions {
  bool rdma = true;       // adapters may be given it; left out where the device cannot
  bool shareable = true;  // other processes may be given it; the same
};

// One allocation by virtual memory management, fully mapped and accessible, or nothing.
class DeviceSlab {
 public:
  // At least `bytes` > 0, rounded up to the device's granularity. `device` outlives the slab.
  static absl::StatusOr<std::unique_ptr<DeviceSlab>> create(const Device& device, size_t bytes,
                                                            SlabOptions options = {});
  ~DeviceSlab();
  DeviceSlab(const DeviceSlab&) = delete;
  DeviceSlab& operator=(const DeviceSlab&) = delete;

  DeviceSpan span() const { return {base_, size_}; }
  bool rdma() const { return rdma_; }
  bool shareable() const { return shareable_; }

 private:
  explicit DeviceSlab(const Device& device) : device_(device) {}
  absl::Status map(AllocationProperties properties);

  const Device& device_;
  size_t size_ = 0;
  DevicePointer base_ = 0;
  AllocationHandle handle_ = 0;
  bool created_ = false;
  bool mapped_ = false;
  bool rdma_ = false;
  bool shareable_ = false;
};

// The driver's facts about an address.
struct PointerFacts {
  bool device = false;  // memory of a device; false: the host's, or none that CUDA knows
  bool managed = false;
  bool pinned = false;  // the host's, and registered with the driver
  int ordinal = -1;
  unsigned long long buffer = 0;  // unique for the life of the process, as an address is not
  bool has_handle = false;        // cudaMalloc made it, and other processes may open it
  DeviceSpan mapping;             // what is mapped in one piece around it
};
absl::StatusOr<PointerFacts> query_pointer(const Driver& driver, DevicePointer pointer);
// OK if Baton's kernels may touch the device memory. Memory that another library allocated in a
// context of its own, not the primary one, belongs to that context: a kernel of another context
// that touches it makes the device unusable. InvalidArgument then, with the remedy.
absl::Status reached_by_kernels(const Device& device, DevicePointer pointer);

// Cuts a range of a framework's memory where its allocations meet (expandable segments are many):
// each part can be registered. InvalidArgument where part of it is no device memory, is managed, or
// is another device's.
absl::StatusOr<std::vector<DeviceSpan>> adopt(const Driver& driver, DeviceSpan span);

}  // namespace baton::gpudirect
