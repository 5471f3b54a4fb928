// Blocks, and the regions that they come from.
#include "collectives/memory.h"

#include <cstring>

namespace baton::collectives {

absl::StatusOr<std::unique_ptr<Memory>> Memory::create(Worker& worker) {
  absl::StatusOr<std::unique_ptr<MemoryPool>> pool =
      MemoryPool::create(worker, {.slab_bytes = 16 << 20});
  if (!pool.ok()) return pool.status();
  return std::unique_ptr<Memory>(new Memory(*std::move(pool)));
}

absl::StatusOr<Block> Memory::allocate(size_t bytes) {
  absl::StatusOr<Block> block = pool_->allocate(bytes);
  if (!block.ok()) return block;
  std::memset(block->data, 0, block->size);
  for (const Region& region : regions_) {
    if (region.local.index == block->region.index) return block;
  }
  regions_.push_back({block->region, static_cast<uint32_t>(regions_.size())});
  return block;
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

}  // namespace baton::collectives
