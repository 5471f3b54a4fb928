// CMA: one copy to or from the memory of another process.
#include "transport/shm/cma.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <fstream>
#include <mutex>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "transport/base/worker_keys.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace baton::shm {
namespace {

constexpr int kTries = 32;  // addresses for a gate, before the kernel chooses one
// Asking a pidfd costs a third of a small copy. Each call checks the gate anyway.
constexpr Time kAskEvery = std::chrono::microseconds(50);
constexpr const char* kEnded =
    "the peer's process has ended: no bytes of it can be copied any more";

void append(std::vector<iovec>& list, void* at, size_t bytes) {
  iovec& last = list.back();
  if (list.size() > 1 && static_cast<std::byte*>(last.iov_base) + last.iov_len == at) {
    last.iov_len += bytes;
    return;
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

// Whether the process behind the pidfd is alive. Until it ends no other process gets its number.
bool lives(const CmaPeer& peer) {
  if (peer.pid == getpid()) return true;
  pollfd end{.fd = peer.process, .events = POLLIN, .revents = 0};
  return peer.process >= 0 && poll(&end, 1, 0) == 0;
}

iovec gate_of(const CmaPeer& peer) { return {reinterpret_cast<void*>(peer.gate), kNonceBytes}; }

std::string name_of(Op op) { return op == Op::kWrite ? "process_vm_writev" : "process_vm_readv"; }

ssize_t copy(pid_t pid, Op op, absl::Span<iovec> local, absl::Span<iovec> remote) {
  const auto call = op == Op::kWrite ? process_vm_writev : process_vm_readv;
  return call(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
}

int yama_scope() {
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope ? scope : 0;
}

// Why the kernel says EPERM, and what ends that.
std::string why_not_permitted(pid_t pid) {
  struct stat theirs {};
  const int scope = yama_scope();
  if (scope >= 3) return "kernel.yama.ptrace_scope is 3, which only a restart of the machine ends";
  if (scope == 2) {
    return "kernel.yama.ptrace_scope is 2: run `sysctl kernel.yama.ptrace_scope=0`, or give both "
           "processes CAP_SYS_PTRACE";
  }
  if (scope == 1) {
    return absl::StrFormat(
        "kernel.yama.ptrace_scope is 1: run `sysctl kernel.yama.ptrace_scope=0`, give this process "
        "CAP_SYS_PTRACE, or let "
        "the peer call prctl(PR_SET_PTRACER, %d), as Baton does unless shm.ptracer=off",
        getpid());
  }
  // The kernel gives the files there to root where a process must not be looked into.
  if (geteuid() != 0 && stat(absl::StrFormat("/proc/%d", pid).c_str(), &theirs) == 0 &&
      theirs.st_uid != geteuid()) {
    return "the kernel denies access to the peer's memory: let it call prctl(PR_SET_DUMPABLE, 1), "
           "start it with "
           "no more rights than "
           "this process has, or give this process CAP_SYS_PTRACE";
  }
  return "the peer has rights that this process lacks: run both in one user namespace and with the "
         "same capabilities, or "
         "give this process CAP_SYS_PTRACE there";
}

// Why the kernel refused the call, and what allows it.
absl::Status why_not(pid_t pid, Op op, int error) {
  const std::string call = name_of(op);
  // Only a filter of system calls keeps a process from its own memory.
  uint8_t here = 1;
  iovec own{&here, sizeof here};
  const bool filtered = copy(getpid(), op, absl::MakeSpan(&own, 1), absl::MakeSpan(&own, 1)) < 0;
  if (filtered) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: %s; a sandbox refuses it, or the kernel has no "
                        "CONFIG_CROSS_MEMORY_ATTACH: allow it in the seccomp profile "
                        "of this process (a container: --cap-add SYS_PTRACE)",
                        call, strerror(error)));
  }
  return absl::FailedPreconditionError(absl::StrFormat("%s of process %d: %s; %s", call, pid,
                                                       strerror(error), why_not_permitted(pid)));
}

}  // namespace

void Gate::Unmap::operator()(std::byte* page) const {
  munmap(page, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
}

absl::StatusOr<Gate> Gate::create() {
  const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const auto end = reinterpret_cast<uint64_t>(&bytes);  // stacks are near the end of all addresses
#ifdef ABSL_HAVE_THREAD_SANITIZER
  const uint64_t begin = uint64_t{0x7e8} << 36;  // it ends programs that map anything below
#else
  const uint64_t begin = 0;
#endif
  void* page = MAP_FAILED;
  for (int i = 0; i < kTries && page == MAP_FAILED; ++i) {
    uint64_t at = 0;
    base::fill_with_secret(&at, sizeof at);
    at = (begin + at % (end - begin)) / bytes * bytes;
    page = mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  }
  if (page == MAP_FAILED) {
    page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
  if (page == MAP_FAILED || madvise(page, bytes, MADV_DONTFORK) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("no page for CMA: ", strerror(errno)));
  }
  Gate gate;
  gate.page_.reset(static_cast<std::byte*>(page));
  base::fill_with_secret(gate.nonce_.data(), gate.nonce_.size());
  std::memcpy(page, gate.nonce_.data(), gate.nonce_.size());
  return gate;
}

absl::Status probe_cma(const CmaPeer& peer) {
  if (peer.pid == 0) {
    return absl::FailedPreconditionError(
        "process_vm_readv does not find the peer: the peer is in another pid namespace");
  }
  for (const Op op : {Op::kRead, Op::kWrite}) {
    std::array<uint8_t, kNonceBytes> bytes = op == Op::kRead ? decltype(bytes){} : peer.nonce;
    iovec local{bytes.data(), bytes.size()};
    iovec remote = gate_of(peer);
    const ssize_t got = copy(peer.pid, op, absl::MakeSpan(&local, 1), absl::MakeSpan(&remote, 1));
    if (got == static_cast<ssize_t>(bytes.size()) && bytes == peer.nonce) continue;
    const int error = errno;
    if (got < 0 && error == ESRCH) return absl::UnavailableError(kEnded);
    if (got >= 0 || error == EFAULT) {
      return absl::FailedPreconditionError(
          "process_vm_readv finds another process than the peer: it is in another pid namespace");
    }
    return why_not(peer.pid, op, error);
  }
  if (peer.process < 0 && peer.pid != getpid()) {
    return absl::FailedPreconditionError(
        "the kernel cannot tell whether the peer has ended (no pidfd_open, before Linux 5.3 or in "
        "a sandbox), so another process may reuse its pid");
  }
  return lives(peer) ? absl::OkStatus() : absl::UnavailableError(kEnded);
}

void allow_cma(pid_t peer) {
#ifdef PR_SET_PTRACER
  if (peer == 0 || peer == getpid()) return;
  constexpr pid_t kAny = -1;
  static std::mutex mutex;
  static pid_t allowed = 0;
  const std::lock_guard lock(mutex);
  if (allowed == peer || allowed == kAny) return;
  const bool another_lives = allowed != 0 && (kill(allowed, 0) == 0 || errno != ESRCH);
  allowed = another_lives ? kAny : peer;
  // Fails where there is no Yama, and is not needed there.
  prctl(PR_SET_PTRACER, another_lives ? PR_SET_PTRACER_ANY : static_cast<unsigned long>(peer), 0, 0,
        0);
#endif
}

CmaBatch::CmaBatch() {
  local_.reserve(IOV_MAX);
  remote_.reserve(IOV_MAX);
  clear();
}

void CmaBatch::clear() {
  local_.assign(1, {});
  remote_.assign(1, {});
  bytes_ = 0;
}

void CmaBatch::add(std::byte* local, uint64_t remote, size_t bytes) {
  append(local_, local, bytes);
  append(remote_, reinterpret_cast<void*>(remote), bytes);
  bytes_ += bytes;
}

absl::Status CmaBatch::run(CmaPeer& peer, Op op) {
  absl::Status status;
  if (const Time now = Clock::steady().now();
      peer.asked_at == kNever || now - peer.asked_at >= kAskEvery) {
    peer.asked_at = now;
    if (!lives(peer)) status = absl::UnavailableError(kEnded);
  }
  if (status.ok()) status = move(peer, op);
  clear();
  return status;
}

absl::Status CmaBatch::move(const CmaPeer& peer, Op op) {
  absl::Span<iovec> local = absl::MakeSpan(local_).subspan(1);
  absl::Span<iovec> remote = absl::MakeSpan(remote_).subspan(1);
  while (bytes_ != 0) {
    // The gate goes before what is left to copy, in place of what is done.
    std::array<uint8_t, kNonceBytes> nonce = op == Op::kWrite ? peer.nonce : decltype(nonce){};
    const absl::Span<iovec> from(local.data() - 1, local.size() + 1);
    const absl::Span<iovec> to(remote.data() - 1, remote.size() + 1);
    from.front() = {nonce.data(), nonce.size()};
    to.front() = gate_of(peer);
    const ssize_t moved = copy(peer.pid, op, from, to);
    const int error = errno;
    if (moved > static_cast<ssize_t>(kNonceBytes) && nonce == peer.nonce) {
      const size_t bytes = static_cast<size_t>(moved) - kNonceBytes;
      bytes_ -= bytes;  // may be fewer than asked for: go on from there
      skip(local, bytes);
      skip(remote, bytes);
      continue;
    }
    if (moved < 0 && error == EINTR) continue;
    if (moved == static_cast<ssize_t>(kNonceBytes) && nonce == peer.nonce) {
      return absl::FailedPreconditionError(
          absl::StrCat(name_of(op),
                       ": memory of this transfer is no longer mapped: keep memory mapped until it "
                       "is deregistered"));
    }
    // The gate is missing, or holds another secret.
    if (moved >= 0 || error == ESRCH || error == EFAULT) return absl::UnavailableError(kEnded);
    if (error == EPERM || error == EACCES || error == ENOSYS) {
      return absl::PermissionDeniedError(why_not(peer.pid, op, error).message());
    }
    return absl::UnavailableError(absl::StrFormat("%s failed: %s", name_of(op), strerror(error)));
  }
  return absl::OkStatus();
}

}  // namespace baton::shm
