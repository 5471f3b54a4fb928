// Fuzzes the lines that workers tell routers of their caches in: what is taken comes back from a
// line of our own, and what is refused is put in words.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/serve/cache/cache_events.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace serve = baton::engine::serve;
  const std::string_view line(reinterpret_cast<const char*>(data), size);
  const auto news = serve::parse_cache_line(line);
  if (!news.ok()) {
    if (!absl::IsInvalidArgument(news.status()) || news.status().message().empty()) std::abort();
    return 0;
  }
  if (news->snapshot && !news->removed.empty()) std::abort();
  const auto again = serve::parse_cache_line(serve::cache_line(*news, "m"));
  if (!again.ok() || again->snapshot != news->snapshot || again->changes != news->changes ||
      again->stored != news->stored || again->removed != news->removed) {
    std::abort();
  }
  return 0;
}
