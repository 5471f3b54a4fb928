// Turns what the prefix cache did into vLLM's events.
#include "engine/kv_events/cache_batch.h"

#include <string>
#include <variant>

#include "engine/kernels/kv_cache.h"

namespace baton::engine::kv_events {
namespace {

SentHash sent(const serve::BlockHash& hash) {
  return {reinterpret_cast<const char*>(&hash), sizeof(hash)};
}

}  // namespace

EventBatch batch_of(std::span<const serve::CacheEvent> events) {
  EventBatch batch;
  for (const serve::CacheEvent& event : events) {
    KvEvent* last = batch.events.empty() ? nullptr : &batch.events.back();
    if (!event.stored) {
      if (last == nullptr || !std::holds_alternative<BlockRemoved>(*last)) {
        last = &batch.events.emplace_back(
            BlockRemoved{.medium = std::string(kEngineMedium), .group = 0});
      }
      std::get<BlockRemoved>(*last).hashes.push_back(sent(event.hash));
      continue;
    }
    auto* stored = last == nullptr ? nullptr : std::get_if<BlockStored>(last);
    const auto parent =
        event.parent.has_value() ? std::optional(sent(*event.parent)) : std::nullopt;
    if (stored == nullptr || !parent.has_value() || stored->hashes.back() != *parent) {
      stored = &std::get<BlockStored>(
          batch.events.emplace_back(BlockStored{.parent = parent,
                                                .block_size = kBlockTokens,
                                                .medium = std::string(kEngineMedium),
                                                .group = 0,
                                                .group_kind = "full_attention"}));
    }
    stored->hashes.push_back(sent(event.hash));
    stored->tokens.insert(stored->tokens.end(), event.tokens.begin(), event.tokens.end());
  }
  return batch;
}

}  // namespace baton::engine::kv_events
