// Memory to be registered, as /proc/self/maps has it.
#include "transport/internal/mapped.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/str_format.h"
#include "transport/internal/device_memory.h"

namespace baton::internal {
namespace {

absl::Status refused(const void* data, size_t size, uintptr_t from, uintptr_t to,
                     const char* what) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "registering %u bytes at %p: [%#x, %#x) of them %s", size, data, from, to, what));
}

}  // namespace

absl::StatusOr<Mapped> check_mapped(const void* data, size_t size, Access access) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + size;
  if (end < begin) {
    return absl::InvalidArgumentError(
        absl::StrFormat("registering %u bytes at %p: that is past the end of memory", size, data));
  }
  std::ifstream maps("/proc/self/maps");
  if (!maps) return Mapped{};
  Mapped out;
  uintptr_t checked = begin;
  for (std::string line; checked < end && std::getline(maps, line);) {
    uintptr_t from = 0;
    uintptr_t to = 0;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &from, &to, rights) != 3) {
      continue;
    }
    if (to <= checked) continue;
    if (from > checked) break;  // a hole: the lines are in order
    const uintptr_t until = std::min(to, end);
    if (rights[0] != 'r') {
      return refused(data, size, checked, until, "cannot be read: map them with PROT_READ");
    }
    if (rights[1] != 'w') {
      if (allows(access, Access::kRemoteWrite)) {
        return refused(data, size, checked, until,
                       "cannot be written: map them with PROT_WRITE too, or register them with "
                       "Access::kRemoteRead");
      }
      out.writable = false;
    }
    checked = until;
  }
  if (checked < end) {
    return refused(data, size, checked, end,
                   "begin where nothing is mapped: register memory only while it is there");
  }
  return out;
}

absl::StatusOr<Examined> examine_memory(const void* data, size_t size, Access access,
                                        const BackingFile& file) {
  Examined out{.file = file};
  if (const internal::DeviceMemory* devices = internal::device_memory(); devices != nullptr) {
    absl::StatusOr<MemoryPlace> place = devices->place(data, size);
    if (!place.ok()) return place.status();
    out.place = *place;
    if (out.place.kind == MemoryKind::kDevice && access != Access::kLocal) {
      absl::StatusOr<DeviceExport> shared = devices->share(data, size);
      out.why_not_shared = shared.status();
      if (shared.ok()) {
        out.shared = *shared;
        out.shared_made.reset(shared->fd);
      }
    }
    if (out.place.kind == MemoryKind::kDevice && !file.dma_buf) {
      absl::StatusOr<BackingFile> made = devices->dma_buf(data, size);
      out.why_no_dma_buf = made.status();
      if (made.ok()) {
        out.file = *made;
        out.made.reset(made->fd);
      }
    }
  }
  if (file.dma_buf) out.place.kind = MemoryKind::kDevice;
  if (out.place.kind == MemoryKind::kDevice) return out;  // no mapping of the host's says of it
  absl::StatusOr<Mapped> mapped = check_mapped(data, size, access);
  if (!mapped.ok()) return mapped.status();
  out.writable = mapped->writable;
  return out;
}

}  // namespace baton::internal
