// The three word patterns in use, matched by hand: they need no regular expression engine.
//
//   GPT-2    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   Llama 3  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
//            ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   Qwen 2   the same with \p{N}
#include "engine/tokenizer/pre_tokenizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include <algorithm>
#include <iterator>

#include "engine/tokenizer/token_text.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {
namespace {

enum class Kind { kLetter, kNumber, kSpace, kOther, kEnd };

struct Scan {
  std::string_view text;

  Kind kind(size_t at, size_t* bytes = nullptr) const {
    if (at >= text.size()) return Kind::kEnd;
    const Character c = decode_character(text, at);
    if (bytes != nullptr) *bytes = c.bytes;
    if (!c.valid) return Kind::kOther;
    if (is_letter(c.code)) return Kind::kLetter;
    if (is_number(c.code)) return Kind::kNumber;
    return is_space(c.code) ? Kind::kSpace : Kind::kOther;
  }
  // The end of the run of `kind` from `at`, at most `limit` characters.
  size_t run(size_t at, Kind want, size_t limit = SIZE_MAX) const {
    size_t bytes = 0;
    for (; limit > 0 && kind(at, &bytes) == want; --limit) at += bytes;
    return at;
  }
  bool newline(size_t at) const {
    return at < text.size() && (text[at] == '\n' || text[at] == '\r');
  }
};

// 's 't 're 've 'm 'll 'd at the start of the text; 0 if none.
size_t contraction(std::string_view text, bool any_case) {
  if (text.size() < 2 || text[0] != '\'') return 0;
  const auto lower = [&](size_t i) -> char {
    if (i >= text.size()) return '\0';
    const char c = text[i];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  };
  const char a = lower(1), b = lower(2);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
  return 0;
}

// \s+(?!\S)|\s+ : a run of spaces leaves its last one to the word behind it.
size_t spaces(const Scan& scan) {
  const size_t end = scan.run(0, Kind::kSpace);
  if (end == scan.text.size()) return end;
  size_t last = 0;
  for (size_t at = 0; at < end;) {
    size_t bytes = 0;
    scan.kind(at, &bytes);
    last = at;
    at += bytes;
  }
  return last > 0 ? last : end;
}

size_t gpt2_word(std::string_view text) {
  if (const size_t n = contraction(text, false); n > 0) return n;
  const Scan scan{text};
  const size_t start = text[0] == ' ' && scan.kind(1) != Kind::kEnd ? 1 : 0;
  const Kind kind = scan.kind(start);
  if (kind != Kind::kSpace) return scan.run(start, kind);
  return spaces(scan);
}

size_t llama3_word(std::string_view text, size_t digits) {
  if (const size_t n = contraction(text, true); n > 0) return n;
  const Scan scan{text};
  size_t first_bytes = 0;
  const Kind first = scan.kind(0, &first_bytes);
  // A word may take any one character before it that is neither a line end nor a number.
  if (first == Kind::kLetter) return scan.run(0, Kind::kLetter);
  if (first != Kind::kNumber && !scan.newline(0) && scan.kind(first_bytes) == Kind::kLetter) {
    return scan.run(first_bytes, Kind::kLetter);
  }
  if (first == Kind::kNumber) return scan.run(0, Kind::kNumber, digits);
  const size_t start = text[0] == ' ' ? 1 : 0;
  if (scan.kind(start) == Kind::kOther) {
    size_t end = scan.run(start, Kind::kOther);
    while (scan.newline(end)) ++end;
    return end;
  }
  // \s*[\r\n]+ : up to the last line end of the run of spaces.
  const size_t end = scan.run(0, Kind::kSpace);
  for (size_t at = end; at > 0; --at) {
    if (scan.newline(at - 1)) return at;
  }
  return spaces(scan);
}

}  // namespace

size_t next_word(std::string_view text, PreTokenizer pattern) {
  switch (pattern) {
    case PreTokenizer::kGpt2:
      return gpt2_word(text);
    case PreTokenizer::kLlama3:
      return llama3_word(text, 3);
    case PreTokenizer::kQwen2:
      return llama3_word(text, 1);
    case PreTokenizer::kSpaces:
      return std::min(text.find(kMetaspace, 1), text.size());
    case PreTokenizer::kNone:
      break;
  }
  return text.size();
}

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

bool is_letter(uint32_t code) {
  return (U_GET_GC_MASK(static_cast<UChar32>(code)) & U_GC_L_MASK) != 0;
}

bool is_number(uint32_t code) {
  return (U_GET_GC_MASK(static_cast<UChar32>(code)) & U_GC_N_MASK) != 0;
}

bool is_space(uint32_t code) {
  return (code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

}  // namespace baton::engine
