// Allocating a KV cache, and how peers are told what lies in it.
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/shard/limits.h"
#include "transport/base/limits/memory_left.h"
#include "transport/base/limits/refusals.h"

namespace baton::engine::shard {
namespace {

kvtransfer::KvLayout layout_of(const Model& model, uint32_t blocks, bool on_device) {
  const KvGeometry geometry = model.kv_geometry();
  const auto heads = static_cast<uint32_t>(geometry.kv_heads);
  kvtransfer::KvLayout layout = kvtransfer::KvLayout::transposed_keys(
      {.layers = static_cast<uint32_t>(geometry.layers),
       .blocks = blocks,
       .block_tokens = static_cast<uint32_t>(geometry.block_tokens),
       .total_heads = static_cast<uint32_t>(model.config().num_kv_heads),
       .first_head = heads * static_cast<uint32_t>(model.shard().rank),
       .heads = heads,
       .head_size = static_cast<uint32_t>(geometry.head_dim),
       .dtype = kvtransfer::KvDtype::kBfloat16});
  layout.model.weights = model.fingerprint();
  for (kvtransfer::KvBuffer& buffer : layout.buffers) {
    if (on_device) buffer.device = kvtransfer::KvDevice::kCuda;
  }
  return layout;
}

}  // namespace

absl::StatusOr<KvMemory> KvMemory::make(const Model& model, uint32_t blocks,
                                        kvtransfer::KvConnector* connector, ModelRunner* runner) {
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
  if (base != nullptr) {
    if (connector != nullptr) {
      absl::Status status =
          connector->register_cache(layout_of(model, blocks, true), absl::MakeConstSpan(&base, 1));
      if (!status.ok()) return status;
    }
  } else if (connector != nullptr) {
    absl::StatusOr<void*> shared = connector->allocate_cache(layout_of(model, blocks, false));
    if (absl::IsResourceExhausted(shared.status())) return fewer(shared.status());
    if (!shared.ok()) return shared.status();
    base = *shared;
  } else {
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
