// Tokens that are matched whole in text, before anything else looks at it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace baton::engine {

struct TokenizerSpec;
struct AddedToken;

class AddedTokens {
 public:
  // Those that are looked for in normalized text, or the others.
  AddedTokens() = default;
  AddedTokens(const TokenizerSpec& spec, bool normalized);

  struct Piece {
    int32_t id = -1;  // of an added token; -1: text between them
    std::string_view text;
  };
  // The text in pieces, in order. Of several tokens that begin at one place the longest is taken.
  std::vector<Piece> split(std::string_view text, bool with_special) const;

 private:
  struct Pattern {
    std::string text;
    int32_t id;
    bool special, single_word, lstrip, rstrip;
  };
  const Pattern* match(std::string_view text, size_t at, bool with_special) const;
  std::vector<Pattern> patterns_;
  std::array<bool, 256> first_{};  // bytes that patterns begin with
};

}  // namespace baton::engine
