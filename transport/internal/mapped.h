// Facts from the kernel about memory that is to be registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/region.h"

namespace baton::internal {

struct Mapped {
  bool writable = true;  // all of it
};

// Looks [data, data + size) up among this process's mappings. InvalidArgument when some of it is
// not mapped, cannot be read, or cannot be written though `access` lets peers write. Where the
// kernel does not tell (no /proc), everything passes.
absl::StatusOr<Mapped> check_mapped(const void* data, size_t size, Access access);

// While one lives, its thread's look-ups use the list of mappings read when it was made. For calls
// that register many ranges: a separate look-up reads the kernel's list from its start, so n ranges
// would cost n squared.
class OneLookAtMappings {
 public:
  OneLookAtMappings();
  ~OneLookAtMappings();
  OneLookAtMappings(const OneLookAtMappings&) = delete;
  OneLookAtMappings& operator=(const OneLookAtMappings&) = delete;

  struct Mapping {
    uintptr_t from = 0;
    uintptr_t to = 0;
    bool readable = false;
    bool writable = false;
  };
  // In order; nothing where the kernel does not tell.
  const std::optional<std::vector<Mapping>>& mappings() const { return mappings_; }

 private:
  std::optional<std::vector<Mapping>> mappings_;
  const OneLookAtMappings* const before_;
};
// How often this process has read its mappings, from the first on.
uint64_t looks_at_mappings();

// The facts that register_memory() finds out about memory before it tells peers.
struct Examined {
  MemoryPlace place;
  bool writable = true;
  BackingFile file;     // as given; for memory of a device a dma-buf, where there is one
  base::UniqueFd made;  // of `file`, where it was made here: adapters keep their own reference
  absl::Status why_no_dma_buf;
  absl::Status why_not_by_address = absl::UnimplementedError("");
  DeviceExport shared;         // of memory of a device, where there is one
  base::UniqueFd shared_made;  // of `shared`: providers keep a copy
  absl::Status why_not_shared;
};
absl::StatusOr<Examined> examine_memory(const void* data, size_t size, Access access,
                                        const BackingFile& file);

}  // namespace baton::internal
