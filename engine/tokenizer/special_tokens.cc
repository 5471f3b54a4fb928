// Special tokens of the files beside tokenizer.json.
#include "engine/tokenizer/special_tokens.h"

#include <algorithm>
#include <array>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {
namespace {

constexpr size_t kLargestTokenFile = size_t{16} << 20;
constexpr std::array<const char*, 7> kTokenNames = {
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

absl::Status bad_file(const char* file, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(file, ": ", what));
}

// A token as a string, or as an object with its flags; empty where it is null.
absl::StatusOr<AddedToken> token_of(const nlohmann::json& given, bool special) {
  AddedToken token{.special = special};
  if (given.is_null()) return token;
  if (given.is_string()) {
    token.text = given.get<std::string>();
    return token;
  }
  const nlohmann::json& content = member(given, "content");
  if (!content.is_string())
    return absl::InvalidArgumentError("is neither a string nor an object with \"content\"");
  token.text = content.get<std::string>();
  const auto flag = [&](const char* name, bool fallback) {
    const nlohmann::json& value = member(given, name);
    return value.is_boolean() ? value.get<bool>() : fallback;
  };
  token.special = special || flag("special", false);
  token.normalized = flag("normalized", !token.special);
  token.single_word = flag("single_word", false);
  token.lstrip = flag("lstrip", false);
  token.rstrip = flag("rstrip", false);
  return token;
}

class TokenReader {
 public:
  absl::Status read(const std::string& directory) {
    const char* const files[] = {"tokenizer_config.json", "special_tokens_map.json",
                                 "added_tokens.json"};
    nlohmann::json parsed[3];
    for (int i = 0; i < 3; ++i) {
      absl::StatusOr<nlohmann::json> one = read_json_beside(directory, files[i]);
      if (!one.ok()) return one.status();
      if (!one->is_null() && !one->is_object()) return bad_file(files[i], "it is no object");
      parsed[i] = *std::move(one);
    }
    absl::Status status = names_of(files[0], parsed[0]);
    const nlohmann::json& decoder = member(parsed[0], "added_tokens_decoder");
    if (!status.ok()) return status;
    if (!decoder.is_null()) {
      status = decoder_of(files[0], decoder);
    } else {
      status = names_of(files[1], parsed[1]);
      if (status.ok()) status = ids_of(files[2], parsed[2]);
    }
    return status;
  }

  SpecialTokens take() {
    SpecialTokens out;
    for (const auto& [id, token] : by_id_) out.added.push_back(token);
    for (const auto& [name, token] : named_) {
      if (token.text.empty()) continue;
      out.named[name] = token.text;
      out.added.push_back(token);
    }
    out.added.insert(out.added.end(), extra_.begin(), extra_.end());
    // A token that has a name is special, whatever its flags say.
    for (AddedToken& token : out.added) {
      token.special |= is_named(token.text);
    }
    return out;
  }

 private:
  bool is_named(const std::string& text) const {
    return std::any_of(named_.begin(), named_.end(),
                       [&](const auto& one) { return one.second.text == text; });
  }

  absl::Status name_token(const char* file, const std::string& name, const nlohmann::json& given) {
    const absl::StatusOr<AddedToken> token = token_of(given, true);
    if (!token.ok())
      return bad_file(file, absl::StrCat("\"", name, "\" ", std::string(token.status().message())));
    const auto there = std::find_if(named_.begin(), named_.end(),
                                    [&](const auto& one) { return one.first == name; });
    if (there != named_.end()) {
      there->second = *token;
    } else {
      named_.emplace_back(name, *token);
    }
    return absl::OkStatus();
  }

  // "bos_token" and the like in their order, tokens with names of the model's own, and those
  // without names.
  absl::Status names_of(const char* file, const nlohmann::json& given) {
    absl::Status status;
    for (const char* name : kTokenNames) {
      if (given.contains(name) && status.ok()) status = name_token(file, name, given[name]);
    }
    for (const auto& [name, value] : given.items()) {
      const bool known =
          std::find(kTokenNames.begin(), kTokenNames.end(), name) != kTokenNames.end();
      if (!known && name.ends_with("_token") && value.is_string() && status.ok())
        status = name_token(file, name, value);
    }
    if (!status.ok()) return status;
    const nlohmann::json& extra = member(given, "extra_special_tokens");
    if (extra.is_object()) {
      for (const auto& [name, value] : extra.items()) {
        if (status.ok()) status = name_token(file, name, value);
      }
    }
    for (const char* list : {"extra_special_tokens", "additional_special_tokens"}) {
      const nlohmann::json& tokens = member(given, list);
      if (!tokens.is_null() && !tokens.is_array() && !tokens.is_object()) {
        return bad_file(file, absl::StrCat("\"", list, "\" is no list"));
      }
      if (!tokens.is_array() || tokens.empty()) continue;
      for (const nlohmann::json& one : tokens) {
        const absl::StatusOr<AddedToken> token = token_of(one, true);
        if (!token.ok())
          return bad_file(file, absl::StrCat("an entry of \"", list, "\" ",
                                             std::string(token.status().message())));
        extra_.push_back(*token);
      }
      break;  // transformers takes the newer name's alone
    }
    return status;
  }

  absl::Status decoder_of(const char* file, const nlohmann::json& decoder) {
    for (const auto& [key, value] : decoder.items()) {
      int64_t id = 0;
      const absl::StatusOr<AddedToken> token = token_of(value, false);
      if (!decoder.is_object() || !absl::SimpleAtoi(key, &id) || !token.ok() ||
          token->text.empty()) {
        return bad_file(
            file, absl::StrCat("\"added_tokens_decoder\" has at \"", key, "\" what is no token"));
      }
      by_id_[id] = *token;
    }
    return absl::OkStatus();
  }

  absl::Status ids_of(const char* file, const nlohmann::json& given) {
    for (const auto& [text, id] : given.items()) {
      if (!id.is_number_integer() || text.empty())
        return bad_file(file, absl::StrCat("\"", text, "\" has no id"));
      const bool special = is_named(text) || std::any_of(extra_.begin(), extra_.end(),
                                                         [&wanted = text](const auto& one) {
                                                           return one.text == wanted;
                                                         });
      by_id_[id.get<int64_t>()] = {.special = special, .normalized = !special, .text = text};
    }
    return absl::OkStatus();
  }

  std::vector<std::pair<std::string, AddedToken>> named_;
  std::vector<AddedToken> extra_;
  std::map<int64_t, AddedToken> by_id_;
};

}  // namespace

absl::StatusOr<nlohmann::json> read_json_beside(const std::string& directory, const char* name) {
  const absl::StatusOr<std::string> text =
      read_file(absl::StrCat(directory, "/", name), kLargestTokenFile);
  if (absl::IsNotFound(text.status())) return nlohmann::json();
  if (!text.ok()) return text.status();
  return parse_json(*text, name);
}

absl::StatusOr<SpecialTokens> load_special_tokens(const std::string& directory) {
  TokenReader reader;
  const absl::Status status = reader.read(directory);
  if (!status.ok()) return status;
  return reader.take();
}

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
