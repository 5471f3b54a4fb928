// Descriptors that are kept in case a peer needs them, as those of devices' memory are: half of
// those that a process may have at most. The others are for its sockets and files.
#pragma once

#include <sys/resource.h>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace baton::shm {

// Whether this one may be kept. ResourceExhausted: so many are open that it had better be closed;
// the kernel gives the lowest number that is free.
inline absl::Status may_be_kept(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || static_cast<rlim_t>(fd) < limit.rlim_cur / 2) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrFormat("%d descriptors are open here of %u, and half are reserved for sockets and "
                      "files: raise `ulimit -n`, or register fewer and larger allocations",
                      fd, limit.rlim_cur));
}

}  // namespace baton::shm
