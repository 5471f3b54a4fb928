// Slabs on memfds and huge pages where possible, and the size classes cut from them.
#include "transport/pool.h"

#include <linux/memfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/environment.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/log.h"
#include "transport/worker.h"

namespace baton {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kPage = 4096;
constexpr size_t kSmallest = 64;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Four classes to each power of two: 64, 80, 96, 112, 128, 160, ... rounded to the alignment.
struct SizeClass {
  uint32_t index;
  size_t bytes;
};
SizeClass class_of(size_t bytes) {
  bytes = std::max(bytes, kSmallest);
  const int log = std::bit_width(bytes) - 1;
  const size_t quarter = size_t{1} << (log - 2);
  const size_t step = (bytes - (size_t{1} << log) + quarter - 1) / quarter;  // 0..4
  return {static_cast<uint32_t>(log * 4 + static_cast<int>(step)),
          (size_t{1} << log) + step * quarter};
}

std::byte* map(size_t bytes, int fd) {
  void* at = fd >= 0
                 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                 : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryPool>> MemoryPool::create(Worker& worker,
                                                               PoolOptions options) {
  if (options.slab_bytes == 0) {
    return absl::InvalidArgumentError("a pool needs slab_bytes > 0");
  }
  // A limit is no demand: what does not fit is refused when a slab of it is made.
  if (options.limit_bytes != SIZE_MAX) {
    const absl::Status fits = base::memory_fits("a pool", options.limit_bytes);
    if (!fits.ok()) base::log_event(base::LogLevel::kWarning, "%s", fits.message());
  }
  return std::unique_ptr<MemoryPool>(new MemoryPool(worker, options));
}

MemoryPool::~MemoryPool() {
  if (made_in_ != getpid()) return;  // a forked child's copy: the slabs are the parent's
  for (const Slab& slab : slabs_) {
    worker_.deregister_memory(slab.region).IgnoreError();
    munmap(slab.base, slab.size);
    if (slab.fd >= 0) close(slab.fd);
  }
}

absl::StatusOr<MemoryPool::Slab> MemoryPool::make_slab(size_t bytes) {
  Slab slab;
  slab.size = round_up(bytes, kHugePage);
  if (total_ + slab.size > options_.limit_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "the pool would grow to %u bytes, past its limit of %u: free blocks or raise limit_bytes",
        total_ + slab.size, options_.limit_bytes));
  }
  if (options_.huge_pages) {
    auto file = base::make_memory_file("baton-pool", slab.size, MFD_HUGETLB | MFD_HUGE_2MB);
    slab.fd = file.ok() ? file->release() : -1;
    // Reserved pages can still run out while they are faulted in; mmap() tells beforehand.
    if (slab.fd >= 0) slab.base = map(slab.size, slab.fd);
    if (slab.base == nullptr && slab.fd >= 0) close(std::exchange(slab.fd, -1));
    if (slab.base != nullptr) backing_ = "memfd, 2 MiB pages";
  }
  const bool huge = slab.base != nullptr;
  if (!huge) {
    auto file = base::make_memory_file("baton-pool", slab.size);
    slab.fd = file.ok() ? file->release() : -1;
    slab.base = map(slab.size, slab.fd);
    backing_ = file.ok() ? "memfd, 4 KiB pages"
                         : absl::StrCat("anonymous memory, peers cannot map it (",
                                        file.status().message(), ")");
    if (slab.base != nullptr && options_.huge_pages) {
      madvise(slab.base, slab.size, MADV_HUGEPAGE);
    }
  }
  if (slab.base == nullptr) {
    const int why = errno;
    if (slab.fd >= 0) close(slab.fd);
    return absl::ResourceExhaustedError(
        absl::StrFormat("mapping a slab of %u bytes failed: %s", slab.size, strerror(why)));
  }
  // More pages than the machine has would end the process, so these two ask. Blocks that share a
  // slab are faulted in one by one: what is never handed out takes no memory.
  absl::Status touched;
  if (!huge) {
    touched = bytes > options_.slab_bytes ? base::fault_in("a slab", slab.base, slab.size)
                                          : base::memory_fits("a slab", slab.size);
  }
  const BackingFile file{slab.fd, 0};
  auto region = touched.ok() ? worker_.register_memory(slab.base, slab.size, options_.access, file)
                             : absl::StatusOr<MemoryRegion>(touched);
  if (!region.ok()) {
    munmap(slab.base, slab.size);
    if (slab.fd >= 0) close(slab.fd);
    return region.status();
  }
  slab.region = *region;
  total_ += slab.size;
  return slab;
}

absl::StatusOr<MemoryPool::Slab*> MemoryPool::slab_with(size_t bytes, size_t alignment) {
  for (Slab& slab : slabs_) {
    if (round_up(slab.used, alignment) + bytes <= slab.size) return &slab;
  }
  auto slab = make_slab(std::max(bytes, std::min(options_.slab_bytes, base::most_slab_bytes())));
  if (!slab.ok()) return slab.status();
  slabs_.push_back(*slab);
  return &slabs_.back();
}

absl::StatusOr<Block> MemoryPool::allocate(size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX / 4) {
    return absl::InvalidArgumentError("a block needs a size > 0 that fits in memory");
  }
  const SizeClass size_class = class_of(bytes);
  if (free_.size() <= size_class.index) free_.resize(size_class.index + 1);
  std::vector<Block>& spare = free_[size_class.index];
  if (!spare.empty()) {
    Block block = spare.back();
    spare.pop_back();
    block.size = bytes;
    return block;
  }
  const size_t alignment = size_class.bytes >= kPage ? kPage : kSmallest;
  const size_t take = round_up(size_class.bytes, alignment);
  auto slab = slab_with(take, alignment);
  if (!slab.ok()) return slab.status();
  Slab& from = **slab;
  const size_t offset = round_up(from.used, alignment);
  // No transfer shall meet a page fault: whole pages, from the first that no block has yet.
  const size_t fresh = round_up(from.used, kPage), end = round_up(offset + take, kPage);
  if (fresh < end) base::fault_in(from.base + fresh, end - fresh);
  from.used = offset + take;
  return Block{from.base + offset, bytes, from.region, offset, size_class.index};
}

absl::StatusOr<MemoryRegion> MemoryPool::register_again(const MemoryRegion& region) {
  for (const Slab& slab : slabs_) {
    if (slab.base != region.base) continue;
    return worker_.register_memory(slab.base, slab.size, options_.access, {slab.fd, 0});
  }
  return absl::NotFoundError("this region does not belong to the pool");
}

void MemoryPool::free(const Block& block) { free_[block.size_class].push_back(block); }

}  // namespace baton
