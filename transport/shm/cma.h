// CMA: one copy to or from memory of another process that it cannot share, by process_vm_readv and
// process_vm_writev. Whether the kernel lets us is found by doing it.
//
// The two calls know a process by its number, which another process may have by the time of the
// call: the peer has died, or executes another program. So each call begins with the peer's gate, a
// page that is in no other process at that address: where it is missing the kernel ends the call
// before it copies anything else.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/clock.h"
#include "transport/shm/memory_file.h"
#include "transport/transfer.h"

namespace baton::shm {

// A page of this process with a secret in it, at an address drawn from the whole address space. A
// forked child has no copy.
class Gate {
 public:
  static absl::StatusOr<Gate> create();

  uint64_t address() const { return reinterpret_cast<uint64_t>(page_.get()); }
  const std::array<uint8_t, kNonceBytes>& nonce() const { return nonce_; }

 private:
  struct Unmap {
    void operator()(std::byte* page) const;
  };
  std::unique_ptr<std::byte, Unmap> page_;
  std::array<uint8_t, kNonceBytes> nonce_{};
};

// A process whose memory we copy, and what tells it from the next process with its number.
struct CmaPeer {
  pid_t pid = 0;     // as the kernel numbers it here; 0: it cannot be seen from here
  int process = -1;  // its pidfd, which the caller owns; -1: none
  uint64_t gate = 0;
  std::array<uint8_t, kNonceBytes> nonce{};  // in the gate
  Time asked_at = kNever;                    // when the pidfd was asked last
};

// Reads and writes the gate. OK: CMA works with that process, and it is the one we talk to.
// Unavailable: it has ended. Otherwise what stands in the way and how to remove it.
absl::Status probe_cma(const CmaPeer& peer);

// Asks the kernel (PR_SET_PTRACER) to let process `peer` copy our memory where Yama's ptrace_scope
// is 1. The kernel keeps one such process for each; where several peers live at once this asks for
// all processes of this user.
void allow_cma(pid_t peer);

// Pieces collected for as few system calls as possible. Neighbours are merged on each side.
class CmaBatch {
 public:
  CmaBatch();

  bool full() const { return local_.size() == local_.capacity() || remote_.size() == capacity(); }
  bool empty() const { return bytes_ == 0; }
  void add(std::byte* local, uint64_t remote, size_t bytes);
  // Moves everything and empties the batch, also when it fails. Unavailable: the process has ended.
  // No other process's memory was written; do not use bytes that were read. PermissionDenied: CMA
  // is not allowed any more.
  absl::Status run(CmaPeer& peer, Op op);

 private:
  size_t capacity() const { return remote_.capacity(); }
  absl::Status move(const CmaPeer& peer, Op op);
  void clear();

  // Each begins with the gate.
  std::vector<iovec> local_;
  std::vector<iovec> remote_;
  size_t bytes_ = 0;
};

}  // namespace baton::shm
