// Fuzzes tokenizer.json: a tokenizer that is accepted encodes any bytes to ids of its vocabulary
// and decodes them to the same bytes.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "engine/tokenizer/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = baton::engine::Tokenizer::parse(json);
  if (!tokenizer.ok()) return 0;

  const std::string_view text = json.substr(0, 512);
  const auto ids = tokenizer->encode(text, {.add_prefix = false, .parse_special = false});
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
  }
  if (tokenizer->decode(ids) != text) std::abort();

  baton::engine::StreamDecoder stream(*tokenizer);
  for (const int32_t id : tokenizer->encode(text)) stream.push(id);
  stream.finish();
  return 0;
}
