// Memory to be registered, as /proc/self/maps has it.
#include "transport/internal/mapped.h"

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "absl/strings/str_format.h"

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

}  // namespace baton::internal
