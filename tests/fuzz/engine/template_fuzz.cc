// Fuzzes chat templates: whatever is no template, or not supported, is refused; what is rendered is
// UTF-8 text, or an error, and the same the second time.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/jinja/template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > 4096) return 0;
  const std::string_view source(reinterpret_cast<const char*>(data), size);
  const auto made = baton::engine::jinja::Template::parse(source);
  if (!made.ok()) return 0;
  const nlohmann::ordered_json values = {
      {"messages",
       {{{"role", "user"}, {"content", "Hé 日"}}, {{"role", "assistant"}, {"content", "<a>"}}}},
      {"tools", nullptr},
      {"add_generation_prompt", true},
      {"bos_token", "<s>"}};
  const auto first = made->render(values), second = made->render(values);
  if (first.ok() != second.ok()) std::abort();
  const bool dated = source.find("strftime_now") != source.npos;
  if (first.ok() && !dated && *first != *second) std::abort();
  return 0;
}
