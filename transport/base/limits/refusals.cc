// Remedies by error, and files of memory.
#include "transport/base/limits/refusals.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::base {
namespace {

absl::string_view remedy(int error) {
  switch (error) {
    case EMFILE:
      return "raise the limit on open files of this process (`ulimit -n`)";
    case ENFILE:
      return "the machine has no room for more open files: raise fs.file-max";
    case ENOMEM:
    case ENOBUFS:
      return "free memory, or raise the limits of this process (`ulimit -v`, the cgroup's "
             "memory.max)";
    case EPERM:
    case EACCES:
      return "a sandbox refuses the call: allow it in the seccomp profile of this process";
    case ENOSYS:
      return "the kernel is too old for the call, or a sandbox hides it: allow it in the seccomp "
             "profile of this process";
    case EFBIG:
      return "raise the limit on the size of files (`ulimit -f`)";
    case ENOSPC:
    case EDQUOT:
      return "free some room there";
    default:
      return "";
  }
}

}  // namespace

std::string refusal(absl::string_view call, int error) {
  const absl::string_view what = remedy(error);
  return absl::StrCat(call, ": ", strerror(error), what.empty() ? "" : "; ", what);
}

absl::Status refused(absl::string_view call, int error) {
  const std::string text = refusal(call, error);
  switch (error) {
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOBUFS:
    case ENOSPC:
    case EFBIG:
      return absl::ResourceExhaustedError(text);
    case EPERM:
    case EACCES:
    case ENOSYS:
      return absl::FailedPreconditionError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::Status file_may_have(uint64_t bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      bytes <= limit.rlim_cur) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrFormat("a file of %u bytes is larger than the %u that this process may write: raise "
                      "the limit on the size of files (`ulimit -f`)",
                      bytes, limit.rlim_cur));
}

absl::StatusOr<UniqueFd> make_memory_file(const char* name, uint64_t bytes, unsigned flags) {
  if (absl::Status status = file_may_have(bytes); !status.ok()) return status;
  UniqueFd file(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!file.valid()) return refused("memfd_create", errno);
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return refused(absl::StrFormat("a file of memory with %u bytes", bytes), errno);
  }
  return file;
}

}  // namespace baton::base
