// Memory to be registered, as /proc/self/maps has it.
#include "transport/internal/mapped.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "transport/internal/device_memory.h"

namespace baton::internal {
namespace {

absl::Status refused(const void* data, size_t size, uintptr_t from, uintptr_t to,
                     const char* what) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "registering %u bytes at %p: [%#x, %#x) of them %s", size, data, from, to, what));
}

using Mapping = OneLookAtMappings::Mapping;

thread_local const OneLookAtMappings* look_of_thread = nullptr;
std::atomic<uint64_t> looks{0};

// Calls see(mapping) for each, in order, until it says false. False: the kernel does not tell.
template <typename See>
bool read_mappings(See&& see) {
  ++looks;
  std::ifstream maps("/proc/self/maps");
  if (!maps) return false;
  for (std::string line; std::getline(maps, line);) {
    Mapping mapping;
    char rights[5] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &mapping.from, &mapping.to,
                    rights) != 3) {
      continue;
    }
    mapping.readable = rights[0] == 'r';
    mapping.writable = rights[1] == 'w';
    if (!see(mapping)) break;
  }
  return true;
}

// Walks along a range, from mapping to mapping.
class Walk {
 public:
  Walk(const void* data, size_t size, Access access)
      : data_(data), size_(size), access_(access), checked_(reinterpret_cast<uintptr_t>(data)) {}

  // Whether the next mapping is to be seen, too.
  bool see(const Mapping& mapping) {
    if (mapping.to <= checked_) return true;
    if (mapping.from > checked_) return false;  // a hole
    const uintptr_t until = std::min(mapping.to, end());
    if (!mapping.readable) {
      status_ = refused(data_, size_, checked_, until, "cannot be read: map them with PROT_READ");
    } else if (!mapping.writable && allows(access_, Access::kRemoteWrite)) {
      status_ = refused(data_, size_, checked_, until,
                        "cannot be written: map them with PROT_WRITE too, or register them with "
                        "Access::kRemoteRead");
    }
    writable_ &= mapping.writable;
    checked_ = until;
    return status_.ok() && checked_ < end();
  }
  absl::StatusOr<Mapped> outcome() const {
    if (!status_.ok()) return status_;
    if (checked_ < end()) {
      return refused(data_, size_, checked_, end(),
                     "begin where nothing is mapped: register memory only while it is mapped");
    }
    return Mapped{writable_};
  }

 private:
  uintptr_t end() const { return reinterpret_cast<uintptr_t>(data_) + size_; }

  const void* const data_;
  const size_t size_;
  const Access access_;
  uintptr_t checked_;
  bool writable_ = true;
  absl::Status status_;
};

}  // namespace

OneLookAtMappings::OneLookAtMappings() : before_(look_of_thread) {
  std::vector<Mapping> seen;
  const bool told = read_mappings([&](const Mapping& mapping) {
    seen.push_back(mapping);
    return true;
  });
  if (told) mappings_ = std::move(seen);
  look_of_thread = this;
}
OneLookAtMappings::~OneLookAtMappings() { look_of_thread = before_; }

uint64_t looks_at_mappings() { return looks; }

absl::StatusOr<Mapped> check_mapped(const void* data, size_t size, Access access) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (begin + size < begin) {
    return absl::InvalidArgumentError(
        absl::StrFormat("registering %u bytes at %p: that is past the end of memory", size, data));
  }
  Walk walk(data, size, access);
  const auto see = [&](const Mapping& mapping) { return walk.see(mapping); };
  if (look_of_thread == nullptr) {
    if (size > 0 && !read_mappings(see)) return Mapped{};
    return walk.outcome();
  }
  const std::optional<std::vector<Mapping>>& known = look_of_thread->mappings();
  if (!known) return Mapped{};
  auto at = std::upper_bound(
      known->begin(), known->end(), begin,
      [](uintptr_t address, const Mapping& mapping) { return address < mapping.to; });
  while (at != known->end() && see(*at)) ++at;
  return walk.outcome();
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
    if (out.place.kind == MemoryKind::kDevice) {
      out.why_not_by_address = devices->by_address(data, /*now=*/false);
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
