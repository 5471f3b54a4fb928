// Allocating a KV cache.
#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "engine/shard/limits.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

namespace baton::engine::shard {

void KvMemory::Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

absl::StatusOr<KvMemory> KvMemory::make(const Model& model, uint32_t blocks, ModelRunner* runner,
                                        bool shared) {
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
    void* mapped = MAP_FAILED;
    auto file = shared ? base::make_memory_file("baton-kv-cache", bytes) : base::UniqueFd();
    if (file.ok() && file->valid()) {
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->get(), 0);
    }
    if (mapped != MAP_FAILED) {
      memory.file_ = *std::move(file);
    } else {  // nothing wants to map it, or a sandbox does not let it
      mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    if (mapped == MAP_FAILED)
      return fewer(absl::ResourceExhaustedError(base::refusal("a KV cache", ENOMEM)));
    memory.own_ = {static_cast<std::byte*>(mapped), Unmap{bytes}};
    madvise(mapped, bytes, MADV_HUGEPAGE);
    fits = base::fault_in("a KV cache", memory.own_.get(), bytes);
    if (!fits.ok()) return fewer(fits);
    base = mapped;
  }
  memory.cache_.emplace(geometry, base, blocks);
  return memory;
}

}  // namespace baton::engine::shard
