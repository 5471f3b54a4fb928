// Memory pools: slabs registered once, blocks handed out without registering anything.
//
// A slab is a memfd where the kernel has them, so that a peer on the same machine can map it and
// copy straight into it; on huge pages where some are free, else transparent ones are asked for. It
// is faulted in before it is handed out: no transfer ever waits for a page fault.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"

namespace baton {

class Worker;

struct PoolOptions {
  size_t slab_bytes = 64 << 20;   // a block larger than this gets a slab of its own
  size_t limit_bytes = SIZE_MAX;  // of all slabs together
  Access access = Access::kRemoteReadWrite;
  bool huge_pages = true;  // try them; false: ordinary pages only
};

// A block of pool memory: `size` bytes at `data`, `offset` bytes into `region`.
struct Block {
  std::byte* data = nullptr;
  size_t size = 0;
  MemoryRegion region;
  size_t offset = 0;
  uint32_t size_class = 0;  // for free()
};

// Not thread-safe; one per thread or guard it. Destroy it before its worker, and after every
// transfer that uses its blocks has ended.
class MemoryPool {
 public:
  // Takes no memory yet. A limit_bytes above what is left now is a warning in the log.
  static absl::StatusOr<std::unique_ptr<MemoryPool>> create(Worker& worker,
                                                            PoolOptions options = {});
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least `bytes` bytes (> 0), aligned to 64, or to a page from 4 KiB on. Blocks come in size
  // classes four to a power of two, so at most a fifth is lost. ResourceExhausted at the limit, or
  // when the machine or a memory cgroup of this process has too little left: pages are taken only
  // where nothing is killed for them.
  absl::StatusOr<Block> allocate(size_t bytes);
  void free(const Block& block);
  // Registers the memory of a block's region a second time, under another key. Deregistering that
  // key (do so before the pool ends) fences only the peers that were given it.
  absl::StatusOr<MemoryRegion> register_again(const MemoryRegion& region);

  // For people: "memfd, 2 MiB pages" or why it is less than that.
  const std::string& backing() const { return backing_; }
  size_t slab_count() const { return slabs_.size(); }

 private:
  struct Slab {
    std::byte* base = nullptr;
    size_t size = 0;  // mapped
    size_t used = 0;  // handed out so far, from the front
    int fd = -1;
    MemoryRegion region;
  };
  MemoryPool(Worker& worker, PoolOptions options) : worker_(worker), options_(options) {}
  absl::StatusOr<Slab*> slab_with(size_t bytes, size_t alignment);
  absl::StatusOr<Slab> make_slab(size_t bytes);

  Worker& worker_;
  const pid_t made_in_ = getpid();
  PoolOptions options_;
  std::string backing_;
  std::vector<Slab> slabs_;
  std::vector<std::vector<Block>> free_;  // by size class
  size_t total_ = 0;
};

}  // namespace baton
