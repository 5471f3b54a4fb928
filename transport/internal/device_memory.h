// The transport's interface to device memory. gpudirect/ implements it: finds the device of an
// address, exports dma-bufs, and copies to and from pinned host memory. Without an implementation
// all memory is the host's.
//
// Internal: programs register device memory with Worker::register_memory(), as any other.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/region.h"
#include "transport/transfer.h"

namespace baton::internal {

// One contiguous part of a copy between a device and a ring's memory.
struct CopyRun {
  std::byte* device = nullptr;  // an address that the CPU must not follow
  std::byte* host = nullptr;    // in the ring, or what pin() got
  size_t bytes = 0;
};

enum class CopyDirection : uint8_t { kToHost, kToDevice };

// Pinned memory of the host, and copies between it and one device. Not thread-safe: of one worker,
// under its progress lock. The destructor waits until what is in flight has ended.
class StagingRing {
 public:
  // The result of a copy: OK, kCancelled for one that was dropped, or the driver's text.
  using Ended = std::function<void(uint64_t cookie, absl::Status status)>;
  virtual ~StagingRing() = default;

  virtual absl::Span<std::byte> memory() const = 0;
  virtual int fd() const = 0;  // behind the memory; -1 where peers cannot map it
  // Queues a copy; urgent ones go first. It ends by one call from progress(), and from then on none
  // of its bytes moves. Never blocks; `runs` is copied.
  virtual void copy(CopyDirection direction, uint64_t cookie, bool urgent,
                    absl::Span<const CopyRun> runs) = 0;
  // Leaves the copy out if it has not begun. It ends in any case.
  virtual void drop(uint64_t cookie) = 0;
  // Looks what has ended and begins what waits; true if anything did. Never blocks. `ended` may
  // call copy() and drop().
  virtual bool progress(const Ended& ended) = 0;
  virtual bool busy() const = 0;  // copies that have not ended: progress() wants to be called
  // How it copies, for people.
  virtual std::string explain() const { return ""; }
  // OK as long as the device is of use.
  virtual absl::Status alive() const = 0;
  // Any thread: makes other memory of the host's fit for copy(), until the last of what is returned
  // ends, which comes after its copies. Both block. An error changes nothing.
  virtual absl::StatusOr<std::shared_ptr<void>> pin(absl::Span<std::byte> /*memory*/) const {
    return absl::UnimplementedError("copies only to and from its own ring");
  }
};

// One contiguous part of a copy between two devices, or within one.
struct DeviceRun {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t bytes = 0;
};

// Copies on a stream of one device, between memory that it can reach. Not thread-safe. The
// destructor waits until what is in flight has ended.
class DeviceCopies {
 public:
  static constexpr size_t kSlots = 4;  // so many at a time
  virtual ~DeviceCopies() = default;

  // Puts a copy on the stream; `slot` is free. No `kernels`: those of this device do not reach all
  // of the memory (PeerMapping::reached_by_kernels()), copy engines do. An error: nothing of it has
  // begun, and the slot stays free. Never blocks.
  virtual absl::Status begin(size_t slot, absl::Span<const DeviceRun> runs,
                             bool kernels = true) = 0;
  // How the copy in the slot ended, which is then free; nothing as long as it may move bytes.
  // Never blocks.
  virtual std::optional<absl::Status> ended(size_t slot) = 0;
};

// Vectors in memory of a device and of the host, combined element by element:
// target[i] = ((sources[0][i] (+) sources[1][i]) (+) ...) / divide_by. The bits are those that the
// host's loops give (collectives/reduce/reduce.h says which, NaN apart).
struct VectorSum {
  enum class Element : uint8_t { kF32, kF16, kBF16, kF64, kI8, kU8, kI32, kI64 };
  enum class Operation : uint8_t { kSum, kProd, kMin, kMax };
  struct Source {
    const std::byte* data = nullptr;
    bool on_device = false;  // an address that the CPU must not follow
  };
  Element element = Element::kF32;
  Operation operation = Operation::kSum;
  uint32_t divide_by = 1;
  size_t count = 0;  // elements
  absl::Span<const Source> sources;
  std::byte* target = nullptr;  // may be one of the sources
  bool target_on_device = false;
};

// Such sums by a kernel of one device. Not thread-safe. The destructor waits until what is in
// flight has ended.
class VectorSums {
 public:
  static constexpr size_t kSlots = 10;  // so many sums at a time
  static constexpr size_t kMostSources = 8;
  virtual ~VectorSums() = default;

  // Lets copies go straight to and from this memory of the host's, which stays until this ends.
  // Blocks for about a second per 2 GiB. Other memory takes another copy, by the CPU. An error
  // changes nothing.
  virtual absl::Status pin(absl::Span<std::byte> memory) = 0;
  // Puts a sum on its way; `slot` is free. The list of the sources is copied, the vectors stay as
  // they are until it has ended. An error: nothing of it has begun, and the slot stays free. Never
  // blocks.
  virtual absl::Status begin(size_t slot, const VectorSum& sum) = 0;
  // How the sum in the slot ended, which is then free; nothing as long as it may touch memory.
  // Never blocks.
  virtual std::optional<absl::Status> ended(size_t slot) = 0;
  // Predicted seconds of such a sum, from start to end, from measurements of the device. Addresses
  // do not matter except for being pinned or not; null counts as pinned.
  virtual double seconds(const VectorSum& sum) const = 0;
};

// An allocation of another process, mapped here until this ends. The physical memory stays for as
// long, whatever becomes of its owner.
class PeerMapping {
 public:
  virtual ~PeerMapping() = default;
  virtual std::byte* data() const = 0;  // an address that the CPU must not follow
  virtual size_t size() const = 0;
  // The device of the memory, by this process's number.
  virtual int device() const = 0;
  // OK if copies on that device's stream reach the memory; else the reason.
  virtual absl::Status reached_by(int device) const = 0;
  // True if that device's kernels may read and write the memory. If false, a kernel that touches it
  // makes the device unusable.
  virtual bool reached_by_kernels(int device) const = 0;
};

// Memory of a device that is ours: for programs that no framework gives any. Not thread-safe.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;

  virtual std::byte* data() const = 0;  // an address that the CPU must not follow
  virtual size_t size() const = 0;
  // Copy `bytes` to and from [offset, offset + bytes) of it; the copy has ended when they return.
  // OutOfRange past its end; otherwise the driver's words, and then part of it may be copied.
  virtual absl::Status put(size_t offset, absl::Span<const std::byte> bytes) = 0;
  virtual absl::Status get(size_t offset, absl::Span<std::byte> bytes) = 0;
};

// Waits between streams of one device and transfers, none of which holds up a thread. For one
// thread at a time.
class TransferGates {
 public:
  using Gate = uint64_t;  // from the call that made it to close()
  struct Hold {
    Gate gate = 0;
    StreamOutcome outcome;
  };
  // Streams that wait are let go on, with the word that nothing was delivered.
  virtual ~TransferGates() = default;

  // A gate that opens when the stream has run all work queued so far, or when the recorded event
  // has happened. ResourceExhausted when all gates are taken; otherwise the driver's error.
  virtual absl::StatusOr<Gate> after_stream(void* stream, Time deadline) = 0;
  virtual absl::StatusOr<Gate> after_event(void* event, Time deadline) = 0;
  // The stream waits from here on, until end() or close(). InvalidArgument for a stream that
  // transfers need.
  virtual absl::StatusOr<Hold> hold(void* stream, Time deadline) = 0;
  // The state of a gate of after_...(): nothing while it waits; OK; or why it will never be passed.
  virtual std::optional<absl::Status> passed(Gate gate, Time now) = 0;
  // Lets the stream of a hold() go on, and tells it whether the data is there. Once; what comes
  // later changes nothing.
  virtual void end(Gate gate, bool delivered) = 0;
  virtual void close(Gate gate) = 0;
};

// Thread-safe; lives as long as the process.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // How many devices there are. Loads the driver if need be, and says in one line why there is
  // none.
  virtual absl::StatusOr<int> count() const {
    return absl::UnimplementedError("built without CUDA support (link gpudirect)");
  }
  // Where [data, data + size) lies. InvalidArgument, with the remedy, for memory that no transfer
  // can use: managed, freed, or in several allocations.
  virtual absl::StatusOr<MemoryPlace> place(const void* data, size_t size) const = 0;
  // A dma-buf of device memory, for adapters to register. The caller closes it. The reason and the
  // remedy where there is none.
  virtual absl::StatusOr<BackingFile> dma_buf(const void* data, size_t size) const = 0;
  // Whether adapters may be given device memory by its address (nvidia-peermem); the reason and the
  // remedy where not. With `now` it is made ready for that, before an adapter registers it.
  virtual absl::Status by_address(const void* /*data*/, bool /*now*/) const {
    return absl::UnimplementedError("built without CUDA support (link gpudirect)");
  }
  // Reads device memory into `to`, so that a caller can check that an adapter reads the same bytes.
  // Takes a few microseconds.
  virtual absl::Status look(const void* /*data*/, absl::Span<std::byte> /*to*/) const {
    return absl::UnimplementedError("built without CUDA support (link gpudirect)");
  }
  // "0000:1b:00.0", as sysfs has it; empty where that is not known.
  virtual std::string pci_address(int /*device*/) const { return ""; }
  // True if the device may see an adapter's writes late, so that flush() must run between the
  // completion and its report. FailedPrecondition: nothing on this device helps.
  virtual absl::StatusOr<bool> wants_flush(int /*device*/) const { return false; }
  // When it has returned OK the device sees all that had been completed. A few microseconds.
  virtual absl::Status flush(int /*device*/) const { return absl::OkStatus(); }
  // A ring of `bytes` for a device. Blocks while the memory is pinned, and a fraction of a second
  // more for a device's first: what copies cost is measured. `kernels`: whether kernels may pack
  // small pieces, where there are any. This outlives it.
  virtual absl::StatusOr<std::unique_ptr<StagingRing>> staging_ring(int /*device*/,
                                                                    size_t /*bytes*/,
                                                                    bool /*kernels*/ = true) const {
    return absl::UnimplementedError(
        "cannot copy from devices: built without CUDA support (link gpudirect)");
  }
  // The allocation of [data, data + size) for processes of this machine. The caller closes the
  // descriptor. The reason where there is none.
  virtual absl::StatusOr<DeviceExport> share(const void* /*data*/, size_t /*size*/) const {
    return absl::UnimplementedError(
        "cannot export memory of devices: built without CUDA support (link gpudirect)");
  }
  // Unavailable: the device that it lies on is no worker's here yet, and is opened meanwhile, which
  // takes the driver a fraction of a second; ask again. Else map() can be called. Never blocks.
  virtual absl::Status may_map(const DeviceExport& /*memory*/) const { return absl::OkStatus(); }
  // Maps what another process has shared; its descriptor can be closed afterwards. Takes the driver
  // about a millisecond, once for each allocation.
  virtual absl::StatusOr<std::unique_ptr<PeerMapping>> map(const DeviceExport& /*memory*/) const {
    return absl::UnimplementedError(
        "cannot map memory of devices: built without CUDA support (link gpudirect)");
  }
  // `kernels`: they may copy small pieces, where there are any. Blocks, some 100 ms, where no
  // caller has measured yet what copies cost on the device; making a ring does.
  virtual absl::StatusOr<std::unique_ptr<DeviceCopies>> copies(int /*device*/,
                                                               bool /*kernels*/ = true) const {
    return absl::UnimplementedError(
        "cannot copy between devices: built without CUDA support (link gpudirect)");
  }
  // Waits until all copies that this process began through any DeviceCopies have ended.
  virtual void wait_for_copies() const {}
  // Gates for so many waits at a time. Blocks while the driver makes them. Unavailable, with the
  // remedy, where streams of the device cannot wait.
  virtual absl::StatusOr<std::unique_ptr<TransferGates>> gates(int /*device*/,
                                                               size_t /*count*/) const {
    return absl::UnimplementedError("built without CUDA support (link gpudirect)");
  }
  // Sums by a kernel of a device. Takes 10 MiB of it and 10 MiB of pinned memory. Blocks for a
  // fraction of a second for a device's first: what sums cost is measured. Unimplemented, with the
  // reason, where there are no kernels for it. This outlives it.
  virtual absl::StatusOr<std::unique_ptr<VectorSums>> sums(int /*device*/) const {
    return absl::UnimplementedError(
        "cannot compute on devices: built without CUDA support (link gpudirect)");
  }
  // At least `bytes` of a device's memory, which adapters may be given where the device can do
  // that. Loads the driver if need be, and says in one line why there is none.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> allocate(int /*device*/,
                                                                 size_t /*bytes*/) const {
    return absl::UnimplementedError(
        "cannot allocate on devices: built without CUDA support (link gpudirect)");
  }
};

// Null takes it out again. Not while a worker registers memory.
void use_device_memory(const DeviceMemory* memory);
// Null: built without CUDA support.
const DeviceMemory* device_memory();

// OK for the host's memory. The word of a provider that moves bytes by the CPU on any other.
absl::Status touched_by_cpu(std::string_view provider, const RegionEntry& region);

}  // namespace baton::internal
