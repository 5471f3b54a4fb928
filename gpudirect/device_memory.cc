// Device memory by virtual memory management, and what a pointer points to.
#include "gpudirect/device_memory.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

std::string mib(size_t bytes) {
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceSlab>> DeviceSlab::create(const Device& device, size_t bytes,
                                                               SlabOptions options) {
  if (absl::Status status = device.alive(); !status.ok()) return status;
  const DeviceFacts& facts = device.facts();
  if (!facts.has(kVirtualMemoryManagement)) {
    return absl::UnimplementedError(
        absl::StrCat("CUDA device ", facts.ordinal,
                     " has no virtual memory management: register memory that "
                     "the application has allocated itself"));
  }
  std::unique_ptr<DeviceSlab> slab(new DeviceSlab(device));
  slab->rdma_ = options.rdma && facts.has(kRdmaWithVirtualMemory);
  slab->shareable_ = options.shareable && facts.has(kHandleTypePosixFd);
  AllocationProperties properties;
  properties.location.id = facts.ordinal;
  properties.requested_handle_types = slab->shareable_ ? kPosixFd : 0;
  properties.flags.rdma_capable = slab->rdma_ ? 1 : 0;
  size_t granularity = 0;
  absl::Status status = device.check(
      device.driver().cuMemGetAllocationGranularity(&granularity, &properties, kGranularityMinimum),
      "asking for the granularity of device memory");
  if (!status.ok()) return status;
  if (granularity == 0 || bytes == 0 || bytes > SIZE_MAX - granularity) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a slab of %u bytes of device memory cannot be made", bytes));
  }
  slab->size_ = (bytes + granularity - 1) / granularity * granularity;
  status = slab->map(properties);
  // Some drivers (WSL's) say that they have memory for adapters, and then give no process access to
  // it.
  if (!status.ok() && slab->rdma_ && !absl::IsResourceExhausted(status) && device.alive().ok()) {
    options.rdma = false;
    return create(device, bytes, options);
  }
  if (!status.ok()) return status;
  return slab;
}

absl::Status DeviceSlab::map(AllocationProperties properties) {
  const Driver& driver = device_.driver();
  const std::string size = mib(size_);
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  AllocationHandle handle = 0;
  absl::Status status = device_.check(driver.cuMemCreate(&handle, size_, &properties, 0),
                                      absl::StrCat("allocating ", size, " of device memory"));
  if (!status.ok()) return status;
  handle_ = handle;
  created_ = true;
  DevicePointer base = 0;
  status = device_.check(driver.cuMemAddressReserve(&base, size_, 0, 0, 0),
                         absl::StrCat("reserving addresses for ", size, " of device memory"));
  if (!status.ok()) return status;
  base_ = base;
  status = device_.check(driver.cuMemMap(base_, size_, 0, handle_, 0),
                         absl::StrCat("mapping ", size, " of device memory"));
  if (!status.ok()) return status;
  mapped_ = true;
  const AccessDescription access{.location = properties.location};
  return device_.check(driver.cuMemSetAccess(base_, size_, &access, 1),
                       absl::StrCat("making ", size, " of device memory accessible"));
}

DeviceSlab::~DeviceSlab() {
  const Driver& driver = device_.driver();
  const Device::Current current(device_);  // or none: the calls need it for recordings alone
  if (mapped_) driver.cuMemUnmap(base_, size_);
  if (base_ != 0) driver.cuMemAddressFree(base_, size_);
  if (created_) driver.cuMemRelease(handle_);
}

absl::StatusOr<PointerFacts> query_pointer(const Driver& driver, DevicePointer pointer) {
  PointerFacts facts;
  unsigned type = 0;
  // The driver writes an int for a boolean.
  int managed = 0;
  int has_handle = 0;
  DevicePointer base = 0;
  size_t size = 0;
  std::array attributes = {kPointerMemoryType,  kPointerIsManaged,   kPointerDeviceOrdinal,
                           kPointerBufferId,    kPointerMappingBase, kPointerMappingSize,
                           kPointerHasIpcHandle};
  std::array<void*, attributes.size()> values = {&type, &managed, &facts.ordinal, &facts.buffer,
                                                 &base, &size,    &has_handle};
  const Result result = driver.cuPointerGetAttributes(static_cast<unsigned>(attributes.size()),
                                                      attributes.data(), values.data(), pointer);
  // No library in this process has used CUDA yet, so nothing is a device's.
  if (result == kNotInitialized) return facts;
  if (result != kSuccess) {
    return driver_status(driver, result, absl::StrFormat("asking what lies at %#x", pointer));
  }
  facts.device = type == kMemoryTypeDevice;
  facts.managed = managed != 0;
  facts.pinned = type == kMemoryTypeHost && managed == 0;
  if (facts.device) facts.mapping = {base, size};
  facts.has_handle = facts.device && has_handle != 0;
  return facts;
}

absl::Status reached_by_kernels(const Device& device, DevicePointer pointer) {
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  Context made_in = nullptr;  // none, of virtual memory management and of pools
  DevicePointer reached_at = 0;
  std::array attributes = {kPointerContext, kPointerOfKernels};
  std::array<void*, attributes.size()> values = {&made_in, &reached_at};
  const Result result = device.driver().cuPointerGetAttributes(
      static_cast<unsigned>(attributes.size()), attributes.data(), values.data(), pointer);
  absl::Status status = device.check(
      result, absl::StrFormat("asking which context has made what is at %#x", pointer));
  if (!status.ok()) return status;
  if (made_in == nullptr || made_in == device.context() || reached_at != 0) return status;
  return absl::InvalidArgumentError(absl::StrFormat(
      "%#x is memory of a context other than the primary one of CUDA device %d, which kernels of "
      "other contexts cannot reach; allocate in the primary one (cudaMalloc, "
      "cuDevicePrimaryCtxRetain), or by cuMemCreate",
      pointer, device.ordinal()));
}

absl::StatusOr<std::vector<DeviceSpan>> adopt(const Driver& driver, DeviceSpan span) {
  std::vector<DeviceSpan> parts;
  if (span.size == 0 || span.data + span.size < span.data) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u bytes at %#x are not a range of device memory", span.size, span.data));
  }
  int ordinal = -1;
  const DevicePointer end = span.data + span.size;
  for (DevicePointer at = span.data; at < end;) {
    absl::StatusOr<PointerFacts> facts = query_pointer(driver, at);
    if (!facts.ok()) return facts.status();
    const std::string where = absl::StrFormat("%u bytes at %#x: ", span.size, span.data);
    if (facts->managed) {
      return absl::InvalidArgumentError(
          absl::StrCat(where,
                       "managed memory migrates between host and device, so no transfer can use "
                       "it; allocate with cudaMalloc"));
    }
    const DevicePointer mapped_to = facts->mapping.data + facts->mapping.size;
    if (!facts->device || facts->mapping.data > at || mapped_to <= at) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%sno device memory is mapped from %#x on; it was freed, or the range is too long", where,
          at));
    }
    if (ordinal >= 0 && ordinal != facts->ordinal) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%sfrom %#x on it is memory of device %d, not %d; register each part by itself", where,
          at, facts->ordinal, ordinal));
    }
    ordinal = facts->ordinal;
    const DevicePointer until = std::min(end, mapped_to);
    parts.push_back({at, static_cast<size_t>(until - at)});
    at = until;
  }
  return parts;
}

}  // namespace baton::gpudirect
