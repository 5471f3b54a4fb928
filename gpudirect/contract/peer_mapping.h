// Memory of a device between processes of one machine (CUDA IPC): exporting the allocation that an
// address lies in, mapping another process's, and copies between the two.
//
// Virtual memory management: its descriptors travel over a socket and need no rights over the other
// process, and an allocation lives as long as any process maps it. Memory of cudaMalloc has no
// such descriptor; it is shared by handles (ipc_handles.h).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "gpudirect/contract/staging.h"
#include "gpudirect/contract/stream_slot.h"
#include "gpudirect/copies/copier.h"
#include "gpudirect/device_memory.h"
#include "transport/internal/device_memory.h"

namespace baton::gpudirect {

// FailedPrecondition, with the remedy, for memory that cannot be shared. The caller closes the
// descriptor.
absl::StatusOr<DeviceExport> export_allocation(const Device& device, DevicePointer at,
                                               const PointerFacts& facts);
// Identifies a device to every process.
absl::StatusOr<std::array<uint8_t, 16>> uuid_of(const Driver& driver, int ordinal);
// The number that a device has in this process. NotFound: it is not visible here.
absl::StatusOr<int> device_with(const Driver& driver, const std::array<uint8_t, 16>& uuid);

// Another process's allocation, mapped completely or not at all. `device` is the one that the
// memory lies on; it outlives this.
class ImportedAllocation final : public internal::PeerMapping {
 public:
  static absl::StatusOr<std::unique_ptr<ImportedAllocation>> map(const Device& device,
                                                                 const DeviceExport& memory);
  ~ImportedAllocation() override;
  ImportedAllocation(const ImportedAllocation&) = delete;
  ImportedAllocation& operator=(const ImportedAllocation&) = delete;

  std::byte* data() const override { return pointer_of<std::byte>(base_); }
  size_t size() const override { return size_; }
  int device() const override { return device_.ordinal(); }
  absl::Status reached_by(int device) const override;
  bool reached_by_kernels(int device) const override { return reached_by(device).ok(); }

 private:
  explicit ImportedAllocation(const Device& device) : device_(device) {}
  absl::Status map(int fd);

  const Device& device_;
  size_t size_ = 0;
  AllocationHandle handle_ = 0;
  bool imported_ = false;  // and the handle not released yet
  DevicePointer base_ = 0;
  bool mapped_ = false;
  std::vector<int> reached_by_;  // devices that may copy
};

// On the device's stream for copies between devices, lists of pieces the way that costs least
// there; an event stands behind each. The device and the launcher outlive it.
class StreamCopies final : public internal::DeviceCopies {
 public:
  static absl::StatusOr<std::unique_ptr<StreamCopies>> create(const Device& device,
                                                              const CopyMeans& means = {});
  ~StreamCopies() override;
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;

  absl::Status begin(size_t slot, absl::Span<const internal::DeviceRun> runs,
                     bool kernels = true) override;
  std::optional<absl::Status> ended(size_t slot) override;

 private:
  explicit StreamCopies(const Device& device) : device_(device) {}

  const Device& device_;
  std::array<StreamSlot, kSlots> slots_;
  std::unique_ptr<Copier> copier_;
  std::vector<CopyPiece> pieces_;
};

// Until everything that is on the stream now has ended.
void wait_for_stream(const Device& device, Direction direction);

}  // namespace baton::gpudirect
