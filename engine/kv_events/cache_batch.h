// What our own prefix cache did, as a batch that vLLM's consumers understand.
#pragma once

#include <span>

#include "engine/kv_events/batch.h"
#include "engine/serve/cache/cache_events.h"

namespace baton::engine::kv_events {

// In order. Blocks that follow one another in a prompt become one event, as do removals in a row.
EventBatch batch_of(std::span<const serve::CacheEvent> events);

}  // namespace baton::engine::kv_events
