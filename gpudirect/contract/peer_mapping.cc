// Exports, maps and copies memory of devices between processes.
#include "gpudirect/contract/peer_mapping.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

constexpr const char* kWhat = "a copy";

DevicePointer device_address(const std::byte* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

absl::StatusOr<std::array<uint8_t, 16>> uuid_of(const Driver& driver, int ordinal) {
  if (driver.cuDeviceGetUuid == nullptr) {
    return absl::UnimplementedError(
        "no CUDA IPC: the driver is older than 11.4 and does not identify its devices");
  }
  int handle = 0;
  DeviceUuid uuid;
  Result result = driver.cuDeviceGet(&handle, ordinal);
  if (result == kSuccess) result = driver.cuDeviceGetUuid(&uuid, handle);
  if (result != kSuccess) {
    return driver_status(driver, result, absl::StrCat("identifying CUDA device ", ordinal, " is"));
  }
  return uuid.bytes;
}

absl::StatusOr<DeviceExport> export_allocation(const Device& device, DevicePointer at,
                                               const PointerFacts& facts) {
  const Driver& driver = device.driver();
  if (!device.facts().has(kHandleTypePosixFd)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA IPC: CUDA device ", device.ordinal(), " exports no descriptors"));
  }
  const absl::StatusOr<std::array<uint8_t, 16>> uuid = uuid_of(driver, device.ordinal());
  if (!uuid.ok()) return uuid.status();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  AllocationHandle handle = 0;
  absl::Status status = device.check(
      driver.cuMemRetainAllocationHandle(&handle, pointer_of<void>(at)),
      "no CUDA IPC: the memory has neither an IPC handle (as from cudaMalloc) nor a descriptor (as "
      "from virtual memory management); memory of a pool, as from cudaMallocAsync, has none");
  if (!status.ok()) return absl::FailedPreconditionError(status.message());
  int fd = -1;
  status = device.check(driver.cuMemExportToShareableHandle(&fd, handle, kPosixFd, 0),
                        "no CUDA IPC: the memory was not allocated to be shared (ask for a handle "
                        "of type CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)");
  driver.cuMemRelease(handle);
  if (!status.ok()) return absl::FailedPreconditionError(status.message());
  return DeviceExport{.fd = fd,
                      .allocation = {facts.mapping.data, facts.buffer},
                      .bytes = facts.mapping.size,
                      .offset = at - facts.mapping.data,
                      .device_uuid = *uuid};
}

absl::StatusOr<int> device_with(const Driver& driver, const std::array<uint8_t, 16>& uuid) {
  int count = 0;
  const Result result = driver.cuDeviceGetCount(&count);
  if (result != kSuccess) return driver_status(driver, result, "counting CUDA devices");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const absl::StatusOr<std::array<uint8_t, 16>> other = uuid_of(driver, ordinal);
    if (!other.ok()) return other.status();
    if (*other == uuid) return ordinal;
  }
  return absl::NotFoundError(
      "no CUDA IPC: the peer's device is not visible in this process; see CUDA_VISIBLE_DEVICES");
}

absl::StatusOr<std::unique_ptr<ImportedAllocation>> ImportedAllocation::map(
    const Device& device, const DeviceExport& memory) {
  std::unique_ptr<ImportedAllocation> out(new ImportedAllocation(device));
  out->size_ = memory.bytes;
  if (absl::Status status = out->map(memory.fd); !status.ok()) return status;
  return out;
}

absl::Status ImportedAllocation::map(int fd) {
  const Driver& driver = device_.driver();
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto named = [&](const char* what) {
    return absl::StrFormat("no CUDA IPC: %s %u bytes of a peer's on CUDA device %d", what, size_,
                           device_.ordinal());
  };
  AllocationHandle handle = 0;
  absl::Status status =
      device_.check(driver.cuMemImportFromShareableHandle(
                        &handle, pointer_of<void>(static_cast<DevicePointer>(fd)), kPosixFd),
                    named("importing"));
  if (!status.ok()) return status;
  handle_ = handle;
  imported_ = true;
  DevicePointer base = 0;
  status = device_.check(driver.cuMemAddressReserve(&base, size_, 0, 0, 0), named("reserving"));
  if (!status.ok()) return status;
  base_ = base;
  status = device_.check(driver.cuMemMap(base_, size_, 0, handle_, 0), named("mapping"));
  if (!status.ok()) return status;
  mapped_ = true;
  int count = 0;
  status = device_.check(driver.cuDeviceGetCount(&count), "counting CUDA devices");
  if (!status.ok()) return status;
  std::vector<AccessDescription> access;
  for (int other = 0; other < count; ++other) {
    int can = other == device_.ordinal() ? 1 : 0;
    if (can == 0 && driver.cuDeviceCanAccessPeer(&can, other, device_.ordinal()) != kSuccess) {
      can = 0;
    }
    if (can == 0) continue;
    access.push_back({.location = {.id = other}});
    reached_by_.push_back(other);
  }
  status = device_.check(driver.cuMemSetAccess(base_, size_, access.data(), access.size()),
                         named("making accessible"));
  if (!status.ok()) return status;
  // The mapping keeps the memory.
  imported_ = false;
  return device_.check(driver.cuMemRelease(handle_), named("releasing the handle of"));
}

ImportedAllocation::~ImportedAllocation() {
  const Driver& driver = device_.driver();
  const Device::Current current(device_);  // or none: the calls need it for recordings alone
  if (mapped_) driver.cuMemUnmap(base_, size_);
  if (base_ != 0) driver.cuMemAddressFree(base_, size_);
  if (imported_) driver.cuMemRelease(handle_);
}

absl::Status ImportedAllocation::reached_by(int device) const {
  if (std::find(reached_by_.begin(), reached_by_.end(), device) != reached_by_.end()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "no CUDA IPC: CUDA device %d has no peer access to device %d", device, device_.ordinal()));
}

absl::StatusOr<std::unique_ptr<StreamCopies>> StreamCopies::create(const Device& device,
                                                                   const CopyMeans& means) {
  if (absl::Status status = device.alive(); !status.ok()) return status;
  std::unique_ptr<StreamCopies> copies(new StreamCopies(device));
  const Device::Current current(device);
  absl::Status status = current.status();
  for (StreamSlot& slot : copies->slots_) {
    if (status.ok()) status = slot.make(device, kWhat);
  }
  if (!status.ok()) return status;
  const auto open = [&](const Launcher* launcher) {
    return Copier::open(device, launcher, device.stream(Direction::kBetween), false);
  };
  auto copier = open(means.launcher);
  // If there is no room for the kernels' lists, copy without kernels.
  if (!copier.ok() && means.launcher != nullptr) copier = open(nullptr);
  if (!copier.ok()) return copier.status();
  copies->copier_ = *std::move(copier);
  copies->copier_->set_table(means.table);
  return copies;
}

StreamCopies::~StreamCopies() {
  for (size_t slot = 0; slot < kSlots; ++slot) {
    while (slots_[slot].busy) ended(slot);
  }
  device_.give_back([&] {
    for (const StreamSlot& slot : slots_) {
      if (slot.event != nullptr) device_.driver().cuEventDestroy(slot.event);
    }
  });
}

absl::Status StreamCopies::begin(size_t number, absl::Span<const internal::DeviceRun> runs,
                                 bool kernels) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  StreamSlot& slot = slots_[number];
  pieces_.clear();
  for (const internal::DeviceRun& run : runs) {
    pieces_.push_back({device_address(run.from), device_address(run.to), run.bytes});
  }
  // Part of it may be on its way also after an error: then ended() tells it.
  slot.status = copier_->copy(CopyRoute::kOnDevice, pieces_, kernels);
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  slot.record(device_, device_.stream(Direction::kBetween), kWhat, absl::OkStatus());
  return absl::OkStatus();
}

std::optional<absl::Status> StreamCopies::ended(size_t number) {
  StreamSlot& slot = slots_[number];
  if (slot.busy && !slot.over(device_, device_.stream(Direction::kBetween), kWhat)) {
    return std::nullopt;
  }
  return slot.status;
}

void wait_for_stream(const Device& device, Direction direction) {
  PollErrorLimit poll_errors;
  while (device.alive().ok()) {
    const Device::Current current(device);
    const Result result =
        current.status().ok() ? device.driver().cuStreamQuery(device.stream(direction)) : kUnknown;
    if (result == kSuccess) return;
    if (result == kNotReady || device.check(result, "waiting for copies").ok()) continue;
    if (poll_errors.reached()) return;
  }
}

}  // namespace baton::gpudirect
