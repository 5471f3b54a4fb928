// Exports and opens the driver's handles of memory that cudaMalloc has made.
#include "gpudirect/contract/ipc_handles.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpudirect/contract/peer_mapping.h"

namespace baton::gpudirect {
namespace {

bool can_open(const Driver& driver) {
  return driver.cuIpcGetMemHandle != nullptr && driver.cuIpcOpenMemHandle != nullptr &&
         driver.cuIpcCloseMemHandle != nullptr && driver.cuMemGetAddressRange != nullptr;
}

absl::Status no_calls() {
  return absl::UnimplementedError(
      "no CUDA IPC: the driver has no IPC handles for memory of cudaMalloc; allocate by virtual "
      "memory management, or install another driver");
}

// Whether copies on the stream of `from` reach memory of `device`.
absl::Status reached(const Device& device, int from) {
  if (from == device.ordinal()) return absl::OkStatus();
  int can = 0;
  if (device.driver().cuDeviceCanAccessPeer(&can, from, device.ordinal()) == kSuccess && can != 0) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "no CUDA IPC: CUDA device %d has no peer access to device %d", from, device.ordinal()));
}

// An allocation of cudaMalloc, of this process or opened by its handle.
class Malloced : public internal::PeerMapping {
 public:
  Malloced(const Device& device, DevicePointer at, size_t bytes)
      : device_(device), at_(at), bytes_(bytes) {}
  std::byte* data() const override { return pointer_of<std::byte>(at_); }
  size_t size() const override { return bytes_; }
  int device() const override { return device_.ordinal(); }
  absl::Status reached_by(int device) const override { return reached(device_, device); }
  // The driver hides memory of cudaMalloc from other devices' kernels, unless the application
  // enables access for a whole context. Copies do not need that.
  bool reached_by_kernels(int device) const override { return device == device_.ordinal(); }

 protected:
  const Device& device_;

 private:
  const DevicePointer at_;
  const size_t bytes_;
};

}  // namespace

absl::StatusOr<DeviceExport> export_handle(const Device& device, DevicePointer at, size_t bytes,
                                           const PointerFacts& facts) {
  const Driver& driver = device.driver();
  if (!can_open(driver)) return no_calls();
  const absl::StatusOr<std::array<uint8_t, 16>> uuid = uuid_of(driver, device.ordinal());
  if (!uuid.ok()) return uuid.status();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  DevicePointer base = 0;
  size_t size = 0;
  absl::Status status = device.check(driver.cuMemGetAddressRange(&base, &size, at),
                                     "no CUDA IPC: asking where the allocation begins");
  if (!status.ok()) return status;
  // The handle covers the whole allocation; check the part's bounds here.
  if (at < base || at - base > size || bytes > size - (at - base)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("no CUDA IPC: %u bytes at %#x are in more than one allocation of "
                        "cudaMalloc; register each by itself",
                        bytes, at));
  }
  IpcHandle handle;
  status = device.check(driver.cuIpcGetMemHandle(&handle, base),
                        "no CUDA IPC: the driver gives no IPC handle for memory of cudaMalloc "
                        "(virtual machines and WSL may lack them)");
  if (!status.ok()) return absl::FailedPreconditionError(status.message());
  return DeviceExport{.allocation = {base, facts.buffer},
                      .bytes = size,
                      .offset = at - base,
                      .device_uuid = *uuid,
                      .by_handle = true,
                      .handle = handle.bytes};
}

class IpcHandles::Mapping final : public Malloced {
 public:
  Mapping(IpcHandles& handles, const Device& device, Key key, DevicePointer at, size_t bytes)
      : Malloced(device, at, bytes), handles_(handles), key_(key) {}
  ~Mapping() override { handles_.unmap(device_, key_); }

 private:
  IpcHandles& handles_;
  const Key key_;
};

absl::StatusOr<std::unique_ptr<internal::PeerMapping>> IpcHandles::map(const Device& device,
                                                                       const DeviceExport& memory) {
  const Driver& driver = device.driver();
  if (!can_open(driver)) return no_calls();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  const Key key{device.ordinal(), memory.handle};
  const std::lock_guard lock(mutex_);
  Opened& opened = opened_[key];
  if (opened.mappings == 0) {
    DevicePointer at = 0;
    const absl::Status status = device.check(
        driver.cuIpcOpenMemHandle(&at, IpcHandle{memory.handle}, kIpcLazyPeerAccess),
        absl::StrFormat("no CUDA IPC: opening the handle of %u bytes of a peer's on CUDA device %d "
                        "(containers need --ipc=host and one pid namespace for that)",
                        memory.bytes, device.ordinal()));
    if (!status.ok()) {
      opened_.erase(key);
      return status;
    }
    DevicePointer base = 0;
    size_t size = 0;
    const bool known = driver.cuMemGetAddressRange(&base, &size, at) == kSuccess && base <= at;
    // A copy past its end would be the end of the device's context.
    if (!known || size - (at - base) < memory.bytes) {
      driver.cuIpcCloseMemHandle(at);
      opened_.erase(key);
      return absl::InvalidArgumentError(absl::StrFormat(
          "no CUDA IPC: the peer claims %u bytes behind its handle, but the driver reports fewer",
          memory.bytes));
    }
    opened.at = at;
  }
  ++opened.mappings;
  return std::make_unique<Mapping>(*this, device, key, opened.at, memory.bytes);
}

void IpcHandles::unmap(const Device& device, const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto opened = opened_.find(key);
  if (--opened->second.mappings > 0) return;
  device.give_back([&] { device.driver().cuIpcCloseMemHandle(opened->second.at); });
  opened_.erase(opened);
}

absl::StatusOr<std::unique_ptr<internal::PeerMapping>> own_allocation(const Device& device,
                                                                      const DeviceExport& memory) {
  const Driver& driver = device.driver();
  if (!can_open(driver)) return no_calls();
  const DevicePointer at = memory.allocation[0];
  const absl::StatusOr<PointerFacts> facts = query_pointer(driver, at);
  if (!facts.ok()) return facts.status();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  DevicePointer base = 0;
  size_t size = 0;
  // Freed meanwhile, and perhaps the address of something else by now.
  if (!facts->device || facts->buffer != memory.allocation[1] ||
      driver.cuMemGetAddressRange(&base, &size, at) != kSuccess || base != at ||
      size < memory.bytes) {
    return absl::NotFoundError(
        "no CUDA IPC: memory that a worker of this process registered was freed");
  }
  return std::make_unique<Malloced>(device, at, memory.bytes);
}

}  // namespace baton::gpudirect
