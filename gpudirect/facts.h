// A CUDA device's properties: queried once, when it is opened, and printed where they matter.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpudirect/driver.h"

namespace baton::gpudirect {

struct FactName {
  DeviceAttribute attribute;
  const char* name;  // in JSON and for people
};
inline constexpr std::array kFactNames = {
    FactName{kComputeCapabilityMajor, "compute_capability_major"},
    FactName{kComputeCapabilityMinor, "compute_capability_minor"},
    FactName{kMultiprocessorCount, "multiprocessors"},
    FactName{kAsyncEngineCount, "copy_engines"},
    FactName{kComputeMode, "compute_mode"},
    FactName{kDmaBufSupported, "dma_buf"},
    FactName{kRdmaSupported, "rdma"},
    FactName{kRdmaWithVirtualMemory, "rdma_with_virtual_memory"},
    FactName{kRdmaFlushWritesOptions, "rdma_flush_options"},
    FactName{kRdmaWritesOrdering, "rdma_writes_ordering"},
    FactName{kCanFlushRemoteWrites, "stream_flush_remote_writes"},
    FactName{kVirtualMemoryManagement, "virtual_memory"},
    FactName{kHandleTypePosixFd, "posix_fd_handles"},
    FactName{kHandleTypeFabric, "fabric_handles"},
    FactName{kIpcEvents, "ipc_events"},
    FactName{kMemoryPools, "memory_pools"},
    FactName{kStreamMemOps64, "stream_memops_64"},
    FactName{kStreamWaitValueNor, "stream_wait_nor"},
    FactName{kHostRegisterSupported, "host_register"},
    FactName{kCanUseHostPointerForRegisteredMemory, "host_pointer_on_device"},
    FactName{kHostAllocDmaBuf, "host_dma_buf"},
    FactName{kHostNumaId, "host_numa_node"},
    FactName{kMemSyncDomains, "memory_sync_domains"},
    FactName{kMpsEnabled, "mps"},
};

struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  std::string pci;  // "0000:1b:00.0", as sysfs has it
  size_t memory_bytes = 0;
  int driver_version = 0;  // 13000: CUDA 13.0
  // In the order of kFactNames. None: this driver does not know the attribute.
  std::array<std::optional<int>, kFactNames.size()> values;

  std::optional<int> value(DeviceAttribute attribute) const;
  bool has(DeviceAttribute attribute) const { return value(attribute).value_or(0) != 0; }
  // {"ordinal": 0, "name": "NVIDIA H100 80GB HBM3", ..., "dma_buf": 1, ...}, in one line; null for
  // what is unknown.
  std::string json() const;
};

// No context is made for it.
absl::StatusOr<DeviceFacts> query_facts(const Driver& driver, int ordinal);

// What must happen between an adapter's completion and its report, so that the reader sees the
// bytes that the adapter wrote to the device's memory.
//
// The reader is the device that has the memory: a kernel or a wait that may be running already.
// (A kernel launched later sees the bytes in any case, but Baton does not know when it is
// launched.)
enum class FlushPolicy : uint8_t {
  kNone,        // its writes are ordered
  kCall,        // cuFlushGPUDirectRDMAWrites() first
  kImpossible,  // nothing that the host can do orders them: no adapter may write there
};

// Decides by the device's own properties alone.
FlushPolicy flush_policy(const DeviceFacts& facts);
const char* words(FlushPolicy policy);

// OK, or FailedPrecondition: adapters' writes are not ordered, and the host cannot flush them.
absl::Status can_be_ordered(const Driver& driver, const DeviceFacts& facts);
// OK if adapters can register a device's memory; else one line why it is staged instead.
absl::Status reachable_by_adapters(const Driver& driver, const DeviceFacts& facts);
// OK if adapters can register the device's addresses instead, which needs a kernel module
// (nvidia-peermem).
absl::Status reachable_by_address(const Driver& driver, const DeviceFacts& facts, bool module);
// True if that kernel module is loaded. sysfs is mounted at `root`.
bool peermem_loaded(const std::string& root);

}  // namespace baton::gpudirect
