// Finding added tokens, and what they take of the spaces around them.
#include "engine/tokenizer/added_tokens.h"

#include <algorithm>

#include "engine/tokenizer/normalizer.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer.h"
#include "engine/tokenizer/unicode_classes.h"

namespace baton::engine {
namespace {

// The start of the character that ends at `end` > 0.
size_t before(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && end - at < 4 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

bool is_word_at(std::string_view text, size_t at) {
  const Character c = decode_character(text, at);
  return c.valid && is_word_character(c.code);
}

bool is_space_at(std::string_view text, size_t at) {
  const Character c = decode_character(text, at);
  return c.valid && is_space(c.code);
}

}  // namespace

AddedTokens::AddedTokens(const TokenizerSpec& spec, bool normalized) {
  for (const AddedToken& token : spec.added_tokens) {
    if (token.normalized != normalized) continue;
    std::string text = token.text;
    // They are looked for in normalized text as they would be written there.
    if (normalized) text = normalize(spec, text);
    first_[static_cast<uint8_t>(text[0])] = true;
    patterns_.push_back(
        {text, token.id, token.special, token.single_word, token.lstrip, token.rstrip});
  }
}

const AddedTokens::Pattern* AddedTokens::match(std::string_view text, size_t at,
                                               bool with_special) const {
  if (!first_[static_cast<uint8_t>(text[at])]) return nullptr;
  const Pattern* best = nullptr;
  for (const Pattern& pattern : patterns_) {
    if (pattern.special && !with_special) continue;
    if (text.substr(at).starts_with(pattern.text) &&
        (best == nullptr || pattern.text.size() > best->text.size())) {
      best = &pattern;
    }
  }
  return best;
}

std::vector<AddedTokens::Piece> AddedTokens::split(std::string_view text, bool with_special) const {
  std::vector<Piece> pieces;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const Pattern* found = match(text, at, with_special);
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->text.size();
    at = end;
    if (found->single_word && ((begin > 0 && is_word_at(text, before(text, begin))) ||
                               (end < text.size() && is_word_at(text, end)))) {
      continue;
    }
    while (found->lstrip && begin > done && is_space_at(text, before(text, begin))) {
      begin = before(text, begin);
    }
    while (found->rstrip && end < text.size() && is_space_at(text, end)) {
      end += decode_character(text, end).bytes;
    }
    if (begin > done) pieces.push_back({-1, text.substr(done, begin - done)});
    pieces.push_back({found->id, text.substr(begin, end - begin)});
    done = at = end;
  }
  if (done < text.size()) pieces.push_back({-1, text.substr(done)});
  return pieces;
}

}  // namespace baton::engine
