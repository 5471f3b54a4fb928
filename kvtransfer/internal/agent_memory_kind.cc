// The kinds of an agent's memory by name, and what is asked of the device provider.
#include "kvtransfer/internal/agent_memory_kind.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/threads/forks.h"
#include "transport/internal/device_memory.h"

namespace baton::kvtransfer {
namespace {

// Loads the driver where it is not loaded yet.
absl::Status check_devices() {
  const base::ForkWaits fork_waits(base::ForkWaits::kMaking);
  const internal::DeviceMemory* const devices = internal::device_memory();
  absl::Status status =
      devices == nullptr ? absl::UnavailableError("this program is built without Baton's gpudirect")
                         : devices->count().status();
  if (status.ok()) return status;
  return absl::UnimplementedError(absl::StrCat(
      "VRAM is memory of CUDA devices, which cannot be used here: ", status.message()));
}

}  // namespace

const char* kind_name(MemoryKind kind) {
  static constexpr const char* kNames[] = {"DRAM", "VRAM", "BLK", "OBJ", "FILE"};
  const auto number = static_cast<size_t>(kind);
  return number < std::size(kNames) ? kNames[number] : "?";
}

MemoryKind kind_of(const RemoteRegion& region) {
  return region.kind == baton::MemoryKind::kDevice ? MemoryKind::kVram : MemoryKind::kDram;
}

absl::Status check_kind(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kDram:
    case MemoryKind::kVram:
      return absl::OkStatus();
    case MemoryKind::kFile:
      return absl::UnimplementedError(
          "files (FILE) can only be the remote side of an agent's transfer with itself: the local "
          "side is host memory (DRAM), and other agents cannot reach files");
    case MemoryKind::kBlock:
    case MemoryKind::kObject:
      return absl::UnimplementedError(absl::StrFormat(
          "%s memory cannot be used here: this agent moves memory of the host (DRAM) and of CUDA "
          "devices (VRAM), and its own files (FILE); copy the bytes there first",
          kind_name(kind)));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("there is no kind of memory %u", static_cast<unsigned>(kind)));
}

absl::Status check_place(const Descriptor& range, MemoryKind kind) {
  const internal::DeviceMemory* const devices = internal::device_memory();
  MemoryPlace place;
  if (devices != nullptr && range.address != 0 && range.bytes != 0) {
    absl::StatusOr<MemoryPlace> found =
        devices->place(reinterpret_cast<const void*>(range.address), range.bytes);
    if (!found.ok()) return found.status();
    place = *found;
  }
  const bool on_device = place.kind == baton::MemoryKind::kDevice;
  if (kind == MemoryKind::kDram && on_device) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u bytes at %#x are memory of %s, which the processor cannot touch: register them as "
        "VRAM, with device %d",
        range.bytes, range.address, place.name(), place.device));
  }
  if (kind == MemoryKind::kDram) return absl::OkStatus();
  if (!on_device) {
    if (absl::Status status = check_devices(); !status.ok()) return status;
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u bytes at %#x are not memory of a CUDA device: register memory of the host as DRAM",
        range.bytes, range.address));
  }
  if (range.device != static_cast<uint64_t>(place.device)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u bytes at %#x are memory of %s, not of device %u: a VRAM descriptor's "
                        "device is its CUDA ordinal in this process",
                        range.bytes, range.address, place.name(), range.device));
  }
  return absl::OkStatus();
}

absl::Status memory_supported(MemoryKind kind) {
  if (kind == MemoryKind::kFile) return absl::OkStatus();
  if (absl::Status status = check_kind(kind); !status.ok()) return status;
  return kind == MemoryKind::kVram ? check_devices() : absl::OkStatus();
}

}  // namespace baton::kvtransfer
