// CMA: one copy to or from memory of another process that it cannot share, by process_vm_readv and
// process_vm_writev. Whether the kernel lets us is found by doing it.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/transfer.h"

namespace baton::shm {

// Reads `nonce` at `address` of process `pid` (as the kernel numbers it here; 0: it cannot be seen
// from here) and compares. OK: CMA works with that process, and it is the one we talk to.
// Unavailable: it has ended. Otherwise what stands in the way and how to remove it.
absl::Status probe_cma(pid_t pid, uint64_t address, absl::Span<const uint8_t> nonce);

// Pieces collected for as few system calls as possible. Neighbours are merged on each side.
class CmaBatch {
 public:
  CmaBatch();

  bool full() const { return local_.size() == local_.capacity() || remote_.size() == capacity(); }
  bool empty() const { return bytes_ == 0; }
  void add(std::byte* local, uint64_t remote, size_t bytes);
  // Moves everything and empties the batch, also when it fails.
  absl::Status run(pid_t pid, Op op);

 private:
  size_t capacity() const { return remote_.capacity(); }

  std::vector<iovec> local_;
  std::vector<iovec> remote_;
  size_t bytes_ = 0;
};

}  // namespace baton::shm
