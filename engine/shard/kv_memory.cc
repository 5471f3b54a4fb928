// Allocating a KV cache.
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/shard/limits.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

namespace baton::engine::shard {

absl::StatusOr<KvMemory> KvMemory::make(const Model& model, uint32_t blocks, ModelRunner* runner) {
  KvMemory memory;
  const KvGeometry geometry = model.kv_geometry();
  const auto fewer = [&](const absl::Status& why) {
    return absl::ResourceExhaustedError(absl::StrCat(
        why.message(), "; a block has ", geometry.cache_bytes(1), " bytes: use fewer --blocks"));
  };
  void* base = nullptr;
  if (runner != nullptr) {
    absl::StatusOr<void*> of_device = runner->allocate_cache(geometry.cache_bytes(blocks));
    if (!of_device.ok()) return of_device.status();
    base = *of_device;
  }
  if (base == nullptr) {
    const size_t bytes = (geometry.cache_bytes(blocks) + 4095) / 4096 * 4096;
    absl::Status fits = base::memory_fits("a KV cache", bytes);
    if (!fits.ok()) return fewer(fits);
    memory.own_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
    if (memory.own_ == nullptr)
      return fewer(absl::ResourceExhaustedError(base::refusal("a KV cache", ENOMEM)));
    fits = base::fault_in("a KV cache", memory.own_.get(), bytes);
    if (!fits.ok()) return fewer(fits);
    std::memset(memory.own_.get(), 0, bytes);
    base = memory.own_.get();
  }
  memory.cache_.emplace(geometry, base, blocks);
  return memory;
}

}  // namespace baton::engine::shard
