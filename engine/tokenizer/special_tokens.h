// Special tokens that a checkpoint names beside tokenizer.json: in tokenizer_config.json, or in the
// older special_tokens_map.json and added_tokens.json.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

struct SpecialTokens {
  // By the names that chat templates know: {"bos_token": "<s>", ...}. What a checkpoint does not
  // name is not there.
  nlohmann::ordered_json named = nlohmann::ordered_json::object();
  // In the order in which transformers adds those that tokenizer.json lacks. Their ids are not
  // looked at.
  std::vector<AddedToken> added;
};

// As transformers reads them: where tokenizer_config.json has "added_tokens_decoder", the older
// files are not looked at; else they add to it. InvalidArgument names the file and the field that
// is wrong. A directory without these files names none.
absl::StatusOr<SpecialTokens> load_special_tokens(const std::string& directory);

// A file of a directory as JSON; null where it does not exist.
absl::StatusOr<nlohmann::json> read_json_beside(const std::string& directory, const char* name);

// Tokens that are matched whole in text, before anything else looks at it.
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
