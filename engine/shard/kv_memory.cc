// Allocating a KV cache.
#include "absl/strings/str_cat.h"
#include "engine/shard/limits.h"

namespace baton::engine::shard {

absl::StatusOr<KvMemory> KvMemory::make(const Model& model, uint32_t blocks, ModelRunner* runner,
                                        bool shared) {
  KvMemory memory;
  const KvGeometry geometry = model.kv_geometry();
  void* base = nullptr;
  if (runner != nullptr) {
    absl::StatusOr<void*> of_device = runner->allocate_cache(geometry.cache_bytes(blocks));
    if (!of_device.ok()) return of_device.status();
    base = *of_device;
  }
  if (base == nullptr) {
    absl::StatusOr<base::CacheMemory> own =
        base::CacheMemory::make({.bytes = geometry.cache_bytes(blocks), .mappable = shared});
    if (!own.ok()) {
      return absl::ResourceExhaustedError(absl::StrCat(own.status().message(), "; a block has ",
                                                       geometry.cache_bytes(1),
                                                       " bytes: use fewer --blocks"));
    }
    memory.own_ = *std::move(own);
    base = memory.own_.data();
  }
  memory.cache_.emplace(geometry, base, blocks);
  return memory;
}

}  // namespace baton::engine::shard
