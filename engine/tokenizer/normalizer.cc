// Composition by ICU.
#include "engine/tokenizer/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/token_text.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

std::string normalize(const TokenizerSpec& spec, std::string_view text) {
  std::string out = spec.nfc ? compose(text) : std::string(text);
  if (spec.space_prefix != SpacePrefix::kEvery || out.empty()) return out;
  out.insert(0, kMetaspace);
  return spaces_as_metaspaces(out);
}

std::string compose(std::string_view text) {
  UErrorCode error = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(error);
  if (U_FAILURE(error)) return std::string(text);
  std::string out;
  icu::StringByteSink<std::string> sink(&out);
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    for (Character c; end < text.size(); end += c.bytes) {
      c = decode_character(text, end);
      if (!c.valid) break;
    }
    nfc->normalizeUTF8(0, {text.data() + at, static_cast<int32_t>(end - at)}, sink, nullptr, error);
    if (end < text.size()) out += text[end++];
    at = end;
  }
  return out;
}

std::string spaces_as_metaspaces(std::string_view text) {
  return replace_all(text, " ", kMetaspace);
}

bool is_word_character(uint32_t code) {
  const auto c = static_cast<UChar32>(code);
  return u_hasBinaryProperty(c, UCHAR_ALPHABETIC) || u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL) ||
         (U_GET_GC_MASK(c) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0;
}

}  // namespace baton::engine
