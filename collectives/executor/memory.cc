// Allocating the blocks of a communicator, and listing the regions that they come from.
#include "collectives/executor/memory.h"

#include <cstring>

namespace baton::collectives::executor {

absl::StatusOr<std::unique_ptr<Memory>> Memory::create(Worker& worker, const Limits& limits) {
  absl::StatusOr<std::unique_ptr<MemoryPool>> pool =
      MemoryPool::create(worker, {.slab_bytes = limits.slab_bytes});
  if (!pool.ok()) return pool.status();
  return std::unique_ptr<Memory>(new Memory(worker, *std::move(pool), limits));
}

absl::StatusOr<Block> Memory::allocate(size_t bytes) {
  absl::StatusOr<Block> block = stage(bytes);
  if (block.ok()) std::memset(block->data, 0, block->size);
  return block;
}

absl::StatusOr<Block> Memory::stage(size_t bytes) {
  absl::StatusOr<Block> block = pool_->allocate(bytes);
  if (!block.ok()) return block;
  if (list_region(*block, limits_.regions)) return block;
  pool_->free(*block);
  return absl::ResourceExhaustedError("a communicator has no room for more regions of memory");
}

absl::StatusOr<Block> Memory::allocate_for_caller(size_t bytes) {
  absl::StatusOr<Block> block = pool_->allocate(bytes);
  if (!block.ok()) return block;
  std::memset(block->data, 0, block->size);
  list_region(*block, limits_.regions_of_callers);
  return block;
}

// False: the region of this block is not listed, and the list is full.
bool Memory::list_region(const Block& block, size_t most) {
  for (const Region& region : regions_) {
    if (region.local.index == block.region.index) return true;
  }
  if (regions_.size() >= most) return false;
  regions_.push_back({block.region, static_cast<uint32_t>(regions_.size())});
  return true;
}

const Memory::Region* Memory::find(const Segments& place) const {
  if (place.total() == 0) return nullptr;
  const std::byte* end = place.run(place.count - 1) + place.bytes;
  for (const Region& region : regions_) {
    if (place.data >= region.local.base && end <= region.local.base + region.local.size) {
      return &region;
    }
  }
  return nullptr;
}

Memory::~Memory() {
  for (const Grant& grant : grants_) worker_.deregister_memory(grant.region).IgnoreError();
}

const Memory::Grant* Memory::grant(uint64_t group, std::byte* data, size_t bytes,
                                   uint64_t& offset) {
  const Region* region = find({data, bytes, 1, 0});
  if (region == nullptr) return nullptr;
  offset = static_cast<uint64_t>(data - region->local.base);
  for (const Grant& grant : grants_) {
    if (grant.group == group && grant.number == region->number) return &grant;
  }
  absl::StatusOr<MemoryRegion> again = pool_->register_again(region->local);
  if (!again.ok()) return nullptr;
  absl::StatusOr<RemoteRegion> remote = worker_.remote_region(*again);
  if (!remote.ok()) return nullptr;
  grants_.push_back({group, region->number, *again, *remote, remote->encode()});
  return &grants_.back();
}

bool Memory::begin_revoke(uint64_t group) {
  bool fenced = true;
  for (const Grant& grant : grants_) {
    if (grant.group == group) fenced &= worker_.begin_deregister(grant.region).value_or(true);
  }
  return fenced;
}

absl::Status Memory::revoke_grants(uint64_t group) {
  absl::Status status;
  std::erase_if(grants_, [&](const Grant& grant) {
    if (grant.group != group) return false;
    status.Update(worker_.deregister_memory(grant.region));
    return true;
  });
  return status;
}

}  // namespace baton::collectives::executor
