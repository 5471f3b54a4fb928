// What the contract knows of memory of devices: whoever drives the devices (gpudirect/) says where
// an address lies and hands out dma-bufs. Without it all memory is the host's.
//
// Internal: programs register device memory with Worker::register_memory(), as any other.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton {

// Thread-safe; lives as long as the process.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Where [data, data + size) lies. InvalidArgument, with the remedy, for memory that no transfer
  // can use: managed, freed, or in several allocations.
  virtual absl::StatusOr<MemoryPlace> place(const void* data, size_t size) const = 0;
  // A dma-buf of device memory, for adapters to register. The caller closes it. The reason and the
  // remedy where there is none.
  virtual absl::StatusOr<BackingFile> dma_buf(const void* data, size_t size) const = 0;
};

// Null takes it out again. Not while a worker registers memory.
void use_device_memory(const DeviceMemory* memory);
// Null: nobody drives devices here.
const DeviceMemory* device_memory();

// OK for the host's memory. The word of a provider that moves bytes by the CPU on any other.
absl::Status touched_by_cpu(std::string_view provider, const RegionEntry& region);

}  // namespace baton
