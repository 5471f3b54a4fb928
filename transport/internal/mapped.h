// What the kernel says about memory that is to be registered.
#pragma once

#include <cstddef>

#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton::internal {

struct Mapped {
  bool writable = true;  // all of it
};

// Looks [data, data + size) up among this process's mappings. InvalidArgument when some of it is
// not mapped, cannot be read, or cannot be written though `access` lets peers write. Where the
// kernel does not tell (no /proc), everything passes.
absl::StatusOr<Mapped> check_mapped(const void* data, size_t size, Access access);

}  // namespace baton::internal
