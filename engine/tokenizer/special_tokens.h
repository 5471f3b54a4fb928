// Special tokens that a checkpoint names beside tokenizer.json: in tokenizer_config.json, or in the
// older special_tokens_map.json and added_tokens.json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
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

}  // namespace baton::engine
