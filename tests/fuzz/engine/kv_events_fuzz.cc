// Fuzzes the batches of KV events that other engines publish: what is taken comes back from bytes
// of our own and can be applied, and what is refused is put in words.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/kv_events/batch.h"
#include "engine/kv_events/token_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace kv_events = baton::engine::kv_events;
  const std::string_view payload(reinterpret_cast<const char*>(data), size);
  const auto batch = kv_events::parse_batch(payload);
  if (!batch.ok()) {
    if (!absl::IsInvalidArgument(batch.status()) || batch.status().message().empty()) std::abort();
    return 0;
  }
  const auto again = kv_events::parse_batch(kv_events::encode_batch(*batch));
  if (!again.ok() || again->events != batch->events || again->rank != batch->rank) std::abort();
  // Twice: the second time what the first one made is there.
  kv_events::TokenIndex index(64);
  for (int i = 0; i < 2; ++i) {
    index.apply(*batch);
    const auto news = index.news();
    if (news.snapshot && news.stored.size() != index.blocks()) std::abort();
    if (index.blocks() > 64) std::abort();
  }
  return 0;
}
