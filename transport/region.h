// Memory regions: ranges registered with a worker once, and what a peer needs to reach one.
//
// A MemoryRegion is a handle to a registered range of this process; a RemoteRegion names a region
// of another worker. A RemoteRegion is only usable while the owner's registration lives: every
// remote access is checked against key, generation, bounds and rights before a byte moves, so a
// stale or forged one is an error at the initiator and touches nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace baton {

// Identity of one worker for its lifetime: a restarted process gets another one. No other worker
// can introduce itself by it (transport/base/worker_keys.h).
struct WorkerUid {
  std::array<uint8_t, 16> bytes{};
  bool operator==(const WorkerUid&) const = default;
  std::string hex() const;
  static WorkerUid random();
};

enum class Access : uint8_t {
  kLocal = 0,            // no remote access
  kRemoteRead = 1,       // peers may read
  kRemoteWrite = 2,      // peers may write
  kRemoteReadWrite = 3,  // both
};
constexpr bool allows(Access have, Access want) {
  return (static_cast<uint8_t>(have) & static_cast<uint8_t>(want)) == static_cast<uint8_t>(want);
}

enum class MemoryKind : uint8_t { kHost, kDevice };

// Where memory lies. The CPU must not touch device memory.
struct MemoryPlace {
  MemoryKind kind = MemoryKind::kHost;
  int device = -1;  // CUDA's number of it; -1: the host, or a device that no provider here drives
  bool operator==(const MemoryPlace&) const = default;
  std::string name() const;  // for people: "CUDA device 0"
};

// Handle to a range registered with a worker. A plain value: copies name the same registration.
// Valid until Worker::deregister_memory(); used after that it is an error, never a crash.
struct MemoryRegion {
  std::byte* base = nullptr;
  size_t size = 0;
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: no region
  Access access = Access::kLocal;
  MemoryPlace place;
};

// A peer needs this to reach a region. 48 bytes, which the application sends to the peer by its own
// means (a notification, a file, HTTP).
struct RemoteRegion {
  WorkerUid owner;
  uint64_t key = 0;  // random, unforgeable
  uint64_t size = 0;
  uint32_t index = 0;
  uint32_t generation = 0;
  Access access = Access::kLocal;
  MemoryKind kind = MemoryKind::kHost;
  bool direct = false;  // of a device: some adapter of its owner's reaches it by itself

  static constexpr size_t kEncodedBytes = 48;
  std::string encode() const;
  static absl::StatusOr<RemoteRegion> decode(std::string_view bytes);
};

// The file behind a region, where there is one: a peer on the same machine can map it. A dma-buf
// stands for memory of a device: adapters register it through the descriptor, no process maps it.
struct BackingFile {
  int fd = -1;        // owned by the caller, open as long as the region is registered
  size_t offset = 0;  // of the region's first byte
  bool dma_buf = false;
};

// Memory of a device as another process of this machine maps it: the whole allocation that a region
// lies in, behind a descriptor or a handle of the driver's.
struct DeviceExport {
  static constexpr size_t kHandleBytes = 64;
  int fd = -1;                            // owned by whoever made it; -1: behind `handle`
  std::array<uint64_t, 2> allocation{};   // names it in this process, for the process's life
  uint64_t bytes = 0;                     // of the allocation; 0: there is no export
  uint64_t offset = 0;                    // of the region's first byte
  std::array<uint8_t, 16> device_uuid{};  // processes may number their devices differently
  // For memory of cudaMalloc: an IPC handle, valid until the memory is freed, so those that opened
  // it must close it first. The process that allocated it cannot open it, and uses allocation[0].
  bool by_handle = false;
  std::array<uint8_t, kHandleBytes> handle{};
  bool same_process = false;  // of whoever maps it
};

// One row of the table that providers see.
struct RegionEntry {
  std::byte* base = nullptr;
  size_t size = 0;
  uint64_t key = 0;
  uint32_t index = 0;
  uint32_t generation = 0;  // 0: free
  Access access = Access::kLocal;
  BackingFile file;
  // A file of the host's that cannot shrink: who registers memory with it, as pools do, keeps it.
  bool stays = false;
  uint32_t users = 0;  // open local transfers that use it
  bool writable = true;
  MemoryPlace place;
  bool direct = false;      // of a device, and some provider has taken it
  DeviceExport shared;      // of a device, where processes of this machine can map it
  bool by_address = false;  // of a device, and adapters may be given the address itself
};

// All regions of one worker. Not thread-safe: the worker's progress lock guards it, and providers
// are only ever called under that lock.
class RegionTable {
 public:
  static constexpr size_t kCapacity = 65536;  // address space; memory comes with each row's use
  explicit RegionTable(WorkerUid owner);

  absl::StatusOr<RegionEntry*> add(std::byte* base, size_t size, Access access, BackingFile file);
  absl::Status remove(const MemoryRegion& region);

  // The live row behind a handle; an error if the region does not exist any more.
  absl::StatusOr<RegionEntry*> find(const MemoryRegion& region);

  // The check that guards every remote access: key, generation, bounds, rights. Returns the address
  // of byte `offset`. The message is meant for the initiator: it names what was wrong. For access
  // by the CPU (kLocal: only the name is checked), so memory of a device is refused; kDevice: for a
  // copy of the device's, which knows no other.
  enum class By : uint8_t { kCpu, kDevice };
  absl::StatusOr<std::byte*> resolve(uint32_t index, uint32_t generation, uint64_t key, Access want,
                                     uint64_t offset, uint64_t bytes, By by = By::kCpu);

  RemoteRegion describe(const RegionEntry& entry) const;
  // All rows that were ever used, in the order of their indices. A row never moves.
  absl::Span<const RegionEntry> entries() const { return entries_; }
  // Whether the memory of a region is kept while it is registered, so that no call need look.
  bool stays(uint32_t index) const {
    return index < entries_.size() && entries_[index].generation != 0 && entries_[index].stays;
  }
  uint64_t registrations() const { return registrations_; }

 private:
  WorkerUid owner_;
  std::vector<RegionEntry> entries_;  // room for all of them, so that none ever moves
  std::vector<uint32_t> free_;
  uint64_t registrations_ = 0;
  uint32_t generation_ = 0;  // of the last registration; never 0 for a live one
};

}  // namespace baton
