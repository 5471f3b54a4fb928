// Explains errors of system calls that the kernel denies to this process, with the remedy.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "transport/base/unique_fd.h"

namespace baton::base {

// "epoll_create1: Too many open files; raise ...": the remedy goes by the error, whichever call it
// came from.
std::string refusal(absl::string_view call, int error);
// The same as a status. FailedPrecondition: this process may not make the call at all;
// ResourceExhausted: a limit is reached; Unavailable: anything else.
absl::Status refused(absl::string_view call, int error);

// ResourceExhausted: a file of `bytes` bytes is past the limit (`ulimit -f`). Ask before a file
// grows: past the limit the kernel also sends SIGXFSZ, which ends a process by default.
absl::Status file_may_have(uint64_t bytes);

// A memfd of `bytes` zeros that is closed on exec and sealed against changes of its size. `flags`:
// more flags for memfd_create(). ResourceExhausted also where this process may not have so large a
// file.
absl::StatusOr<UniqueFd> make_memory_file(const char* name, uint64_t bytes, unsigned flags = 0);

}  // namespace baton::base
