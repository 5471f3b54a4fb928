// Fuzzes tokenizer.json: a tokenizer that is accepted encodes any bytes to ids of its vocabulary
// and, where it changes nothing and lacks no byte, decodes them to the same bytes.

#include "engine/tokenizer/tokenizer.h"
#include "tests/std.h"

namespace {

bool is_exact(const baton::engine::Tokenizer& tokenizer) {
  const baton::engine::TokenizerSpec& spec = tokenizer.spec();
  // Added tokens may take spaces, hide a word whose id they have, or be special words, which have
  // no text.
  bool takes_text = false;
  for (const auto& token : spec.added_tokens) {
    takes_text |=
        token.lstrip || token.rstrip || !spec.tokens[static_cast<size_t>(token.id)].empty();
  }
  std::array<bool, 256> there{};
  for (const std::string& token : spec.tokens) {
    if (token.size() == 1) there[static_cast<uint8_t>(token[0])] = true;
  }
  return !spec.byte_fallback && !spec.nfc && !takes_text &&
         std::all_of(there.begin(), there.end(), [](bool is) { return is; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = baton::engine::Tokenizer::parse(json);
  if (!tokenizer.ok()) return 0;

  const std::string_view text = json.substr(0, 512);
  const auto ids = tokenizer->encode(text, {.add_prefix = false, .parse_special = false});
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
  }
  if (is_exact(*tokenizer) && tokenizer->decode(ids) != text) std::abort();

  baton::engine::StreamDecoder stream(*tokenizer);
  for (const int32_t id : tokenizer->encode(text)) stream.push(id);
  stream.finish();
  return 0;
}
