// Memory of cudaMalloc between processes of one machine: the driver's handles, which name a whole
// allocation. What was allocated by virtual memory management has descriptors (peer_mapping.h).
//
// A handle is worth less than a descriptor. The process that made it cannot open it; a context
// opens one only once; memory that is freed while a process has it open is undefined; and the
// handle of memory that was freed opens nothing, or the memory that came to lie there. So each is
// opened once in a process, closed as soon as no mapping here maps it, and who owns the memory
// waits for that (transport/shm/memory_file.h).
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "gpudirect/device_memory.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// The whole allocation that [at, at + bytes) lies in. FailedPrecondition or Unimplemented, with the
// remedy, where it cannot be shared.
absl::StatusOr<DeviceExport> export_handle(const Device& device, DevicePointer at, size_t bytes,
                                           const PointerFacts& facts);

// The handles that this process has open. Thread-safe; outlives what it has mapped.
class IpcHandles {
 public:
  IpcHandles() = default;
  IpcHandles(const IpcHandles&) = delete;
  IpcHandles& operator=(const IpcHandles&) = delete;

  // `device` is the one that the memory lies on, and outlives the mapping. InvalidArgument for a
  // handle of less memory than is claimed.
  absl::StatusOr<std::unique_ptr<internal::PeerMapping>> map(const Device& device,
                                                             const DeviceExport& memory);

 private:
  class Mapping;
  using Key = std::pair<int, std::array<uint8_t, DeviceExport::kHandleBytes>>;  // device, handle
  struct Opened {
    DevicePointer at = 0;
    size_t mappings = 0;
  };
  void unmap(const Device& device, const Key& key);

  std::mutex mutex_;
  std::map<Key, Opened> opened_;
};

// The same memory in the process that owns it: used where it lies.
absl::StatusOr<std::unique_ptr<internal::PeerMapping>> own_allocation(const Device& device,
                                                                      const DeviceExport& memory);

}  // namespace baton::gpudirect
