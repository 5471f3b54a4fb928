// CMA: one copy to or from the memory of another process.
#include "transport/shm/cma.h"

#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/shm/segment.h"

namespace baton::shm {
namespace {

void append(std::vector<iovec>& list, void* at, size_t bytes) {
  if (!list.empty()) {
    iovec& last = list.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == at) {
      last.iov_len += bytes;
      return;
    }
  }
  list.push_back({at, bytes});
}

// Drops the first `bytes` bytes of what is left to do.
void skip(absl::Span<iovec>& list, size_t bytes) {
  while (bytes != 0) {
    iovec& first = list.front();
    if (bytes < first.iov_len) {
      first.iov_base = static_cast<std::byte*>(first.iov_base) + bytes;
      first.iov_len -= bytes;
      return;
    }
    bytes -= first.iov_len;
    list.remove_prefix(1);
  }
}

}  // namespace

absl::Status probe_cma(pid_t pid, uint64_t address, absl::Span<const uint8_t> nonce) {
  uint8_t seen[kNonceBytes] = {};
  iovec local{seen, sizeof seen};
  iovec remote{reinterpret_cast<void*>(address), sizeof seen};
  const ssize_t got = pid == 0 ? -1 : process_vm_readv(pid, &local, 1, &remote, 1, 0);
  const int error = pid == 0 ? ESRCH : errno;
  if (got == sizeof seen && nonce.size() == sizeof seen &&
      std::memcmp(seen, nonce.data(), sizeof seen) == 0) {
    return absl::OkStatus();
  }
  if (pid != 0 && error == ESRCH && got < 0) {
    return absl::UnavailableError("the peer's process has ended");
  }
  if (got >= 0 || error == EFAULT || error == ESRCH) {
    return absl::FailedPreconditionError(
        "process_vm_readv does not find the peer: it is in another pid namespace");
  }
  if (error == ENOSYS) {
    return absl::FailedPreconditionError(
        "process_vm_readv is not there: the kernel has no CONFIG_CROSS_MEMORY_ATTACH, or seccomp "
        "hides it");
  }
  return absl::FailedPreconditionError(absl::StrFormat(
      "process_vm_readv of process %d failed: %s; run `sysctl kernel.yama.ptrace_scope=0`, give "
      "CAP_SYS_PTRACE, or let the peer call prctl(PR_SET_PTRACER, %d)",
      pid, strerror(error), getpid()));
}

CmaBatch::CmaBatch() {
  local_.reserve(IOV_MAX);
  remote_.reserve(IOV_MAX);
}

void CmaBatch::add(std::byte* local, uint64_t remote, size_t bytes) {
  append(local_, local, bytes);
  append(remote_, reinterpret_cast<void*>(remote), bytes);
  bytes_ += bytes;
}

absl::Status CmaBatch::run(pid_t pid, Op op) {
  absl::Span<iovec> local(local_);
  absl::Span<iovec> remote(remote_);
  absl::Status status;
  while (bytes_ != 0) {
    const auto move = op == Op::kWrite ? process_vm_writev : process_vm_readv;
    const ssize_t moved = move(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (moved > 0) {  // may be fewer than asked for: go on from there
      bytes_ -= static_cast<size_t>(moved);
      skip(local, static_cast<size_t>(moved));
      skip(remote, static_cast<size_t>(moved));
      continue;
    }
    if (moved < 0 && errno == EINTR) continue;
    const char* call = op == Op::kWrite ? "process_vm_writev" : "process_vm_readv";
    if (moved < 0 && errno == ESRCH) {
      status = absl::UnavailableError("the peer's process has ended");
    } else if (moved < 0 && errno == EFAULT) {
      status = absl::FailedPreconditionError(absl::StrFormat(
          "%s: memory of this transfer is not mapped (any more): keep memory until it is "
          "deregistered",
          call));
    } else {
      status = absl::UnavailableError(
          absl::StrFormat("%s failed: %s", call, moved < 0 ? strerror(errno) : "it moved nothing"));
    }
    break;
  }
  local_.clear();
  remote_.clear();
  bytes_ = 0;
  return status;
}

}  // namespace baton::shm
