// What the kernel says about memory that is to be registered.
#pragma once

#include <cstddef>

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

// What register_memory() finds out about memory before anybody hears of it.
struct Examined {
  MemoryPlace place;
  bool writable = true;
  BackingFile file;     // as given; for memory of a device a dma-buf, where there is one
  base::UniqueFd made;  // of `file`, where it was made here: adapters keep their own reference
  absl::Status why_no_dma_buf;
  DeviceExport shared;         // of memory of a device, where there is one
  base::UniqueFd shared_made;  // of `shared`: providers keep a copy
  absl::Status why_not_shared;
};
absl::StatusOr<Examined> examine_memory(const void* data, size_t size, Access access,
                                        const BackingFile& file);

}  // namespace baton::internal
