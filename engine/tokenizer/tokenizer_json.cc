// tokenizer.json of the Hugging Face `tokenizers` library: what is understood, and nothing else.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "engine/files/json_fields.h"
#include "engine/tokenizer/token_text.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {
namespace {

constexpr int32_t kMaxVocab = 1 << 22;

absl::Status bad(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("tokenizer.json: %s", what));
}

bool is_null(const nlohmann::json& value) { return value.is_null(); }
std::string text_of(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : std::string();
}

// The steps of a "Sequence" whose list has this name, or the one step itself; none for null.
std::vector<const nlohmann::json*> steps_of(const nlohmann::json& value, const char* list) {
  std::vector<const nlohmann::json*> steps;
  if (text_of(member(value, "type")) == "Sequence") {
    for (const nlohmann::json& step : member(value, list)) steps.push_back(&step);
  } else if (!is_null(value)) {
    steps.push_back(&value);
  }
  return steps;
}

// The bytes of a token or of a half of a merge; false where it is none.
bool read_token(const TokenizerSpec& spec, const std::string& text, std::string& bytes) {
  if (!spec.byte_fallback) return ByteAlphabet::get().read(text, bytes);
  bytes = text;
  return true;
}

absl::Status read_vocab(const nlohmann::json& model, TokenizerSpec& spec) {
  const nlohmann::json& vocab = member(model, "vocab");
  if (!vocab.is_object() || vocab.empty()) return bad("model.vocab is not an object with tokens");
  std::string bytes;
  for (const auto& [text, id] : vocab.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxVocab) {
      return bad(
          absl::StrFormat("the id of token \"%s\" is not a number in [0, %d)", text, kMaxVocab));
    }
    // A control token may be listed here too.
    if (!read_token(spec, text, bytes)) bytes = text;
    const auto at = id.get<size_t>();
    if (at >= spec.tokens.size()) spec.tokens.resize(at + 1);
    if (!spec.tokens[at].empty()) return bad(absl::StrFormat("two tokens have the id %u", at));
    spec.tokens[at] = bytes;
  }
  return absl::OkStatus();
}

// Gives a token the id that the `tokenizers` library gives it: that of the vocabulary, or the next
// one that is free. That counts words; where the numbering has holes, the last words' ids are given
// away.
void add_token(TokenizerSpec& spec, const absl::flat_hash_map<std::string, int32_t>& vocab,
               AddedToken token) {
  int32_t last = -1;
  for (const AddedToken& there : spec.added_tokens) {
    if (there.text == token.text) return;
    last = std::max(last, there.id);
  }
  const auto words = static_cast<int32_t>(vocab.size());
  const auto known = vocab.find(token.text);
  token.id = known != vocab.end() ? known->second : std::max(last + 1, words);
  if (static_cast<size_t>(token.id) >= spec.tokens.size())
    spec.tokens.resize(static_cast<size_t>(token.id) + 1);
  spec.added_tokens.push_back(std::move(token));
}

absl::Status read_added(const nlohmann::json& root, const std::vector<AddedToken>& more,
                        TokenizerSpec& spec) {
  absl::flat_hash_map<std::string, int32_t> vocab;  // as the file writes it
  for (const auto& [text, id] : member(member(root, "model"), "vocab").items())
    vocab.emplace(text, id.get<int32_t>());
  const nlohmann::json& added = member(root, "added_tokens");
  if (!is_null(added) && !added.is_array()) return bad("added_tokens is not a list");
  for (const nlohmann::json& token : added) {
    const nlohmann::json& id = member(token, "id");
    const std::string content = text_of(member(token, "content"));
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxVocab ||
        content.empty()) {
      return bad("an added token lacks a valid id or content");
    }
    const auto flag = [&](const char* name, bool fallback) {
      const nlohmann::json& value = member(token, name);
      return value.is_boolean() ? value.get<bool>() : fallback;
    };
    add_token(spec, vocab,
              {.special = flag("special", true),
               .normalized = flag("normalized", false),
               .single_word = flag("single_word", false),
               .lstrip = flag("lstrip", false),
               .rstrip = flag("rstrip", false),
               .text = content});
  }
  for (const AddedToken& token : more) {
    if (!token.text.empty()) add_token(spec, vocab, token);
  }
  return absl::OkStatus();
}

absl::Status read_merges(const nlohmann::json& model, TokenizerSpec& spec) {
  const nlohmann::json& merges = member(model, "merges");
  if (!merges.is_array()) return bad("model.merges is not a list");
  absl::flat_hash_map<std::string, int32_t> ids;
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    ids.emplace(spec.tokens[id], static_cast<int32_t>(id));
  }
  std::string bytes;
  for (const nlohmann::json& merge : merges) {
    std::string left, right;
    if (merge.is_array() && merge.size() == 2) {
      left = text_of(merge[0]);
      right = text_of(merge[1]);
    } else if (const std::string both = text_of(merge); both.find(' ') != std::string::npos) {
      left = both.substr(0, both.find(' '));
      right = both.substr(both.find(' ') + 1);
    }
    std::pair<int32_t, int32_t> pair;
    for (auto [text, id] : {std::pair(&left, &pair.first), std::pair(&right, &pair.second)}) {
      const auto it =
          !text->empty() && read_token(spec, *text, bytes) ? ids.find(bytes) : ids.end();
      if (it == ids.end()) {
        return bad(absl::StrFormat("merge %u names \"%s\", which is no token of the vocabulary",
                                   spec.merges.size(), *text));
      }
      *id = it->second;
    }
    spec.merges.push_back(pair);
  }
  return absl::OkStatus();
}

absl::Status read_unknown(const nlohmann::json& model, TokenizerSpec& spec) {
  const std::string name = text_of(member(model, "unk_token"));
  if (name.empty() || !spec.byte_fallback) return absl::OkStatus();
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (spec.tokens[id] == name) spec.unknown_id = static_cast<int32_t>(id);
  }
  if (spec.unknown_id < 0) return bad(absl::StrFormat("unk_token \"%s\" is no token", name));
  return absl::OkStatus();
}

absl::Status read_normalizer(const nlohmann::json& root, TokenizerSpec& spec) {
  bool prepend = false, replace = false;
  for (const nlohmann::json* step : steps_of(member(root, "normalizer"), "normalizers")) {
    const std::string type = text_of(member(*step, "type"));
    if (type == "NFC") {
      spec.nfc = true;
    } else if (type == "Prepend" && text_of(member(*step, "prepend")) == kMetaspace && !replace) {
      prepend = true;
    } else if (type == "Replace" && text_of(member(*step, "content")) == kMetaspace &&
               text_of(member(member(*step, "pattern"), "String")) == " ") {
      replace = true;
    } else {
      return bad(absl::StrFormat("the normalizer \"%s\" is not supported in this place", type));
    }
  }
  if ((prepend || replace) && !spec.byte_fallback) {
    return bad("normalizers of spaces are supported with byte_fallback alone");
  }
  if (prepend && !replace) return bad("the normalizer \"Prepend\" is supported with \"Replace\"");
  if (prepend) spec.space_prefix = SpacePrefix::kEvery;
  if (spec.byte_fallback) spec.pre_tokenizer = PreTokenizer::kNone;
  if (spec.byte_fallback && !replace && is_null(member(root, "pre_tokenizer"))) {
    return bad("it does not define how spaces are encoded: add a normalizer or a pre-tokenizer");
  }
  return absl::OkStatus();
}

absl::Status read_split(const nlohmann::json& step, TokenizerSpec& spec) {
  const std::string pattern = text_of(member(member(step, "pattern"), "Regex"));
  if (pattern != kLlama3Pattern && pattern != kQwen2Pattern) {
    return bad(absl::StrFormat("the split pattern \"%s\" is not supported", pattern));
  }
  if (text_of(member(step, "behavior")) != "Isolated" || member(step, "invert") == true) {
    return bad("the split does something else than isolate the words of its pattern");
  }
  spec.pre_tokenizer = pattern == kLlama3Pattern ? PreTokenizer::kLlama3 : PreTokenizer::kQwen2;
  return absl::OkStatus();
}

absl::Status read_metaspace(const nlohmann::json& step, TokenizerSpec& spec) {
  if (text_of(member(step, "replacement")) != kMetaspace) {
    return bad("the pre-tokenizer \"Metaspace\" has another replacement than U+2581");
  }
  if (spec.space_prefix != SpacePrefix::kNone) {
    return bad("both a normalizer and a pre-tokenizer put spaces before words");
  }
  std::string scheme = text_of(member(step, "prepend_scheme"));
  if (scheme.empty()) scheme = member(step, "add_prefix_space") == false ? "never" : "always";
  if (scheme != "never" && scheme != "always" && scheme != "first") {
    return bad(absl::StrFormat("the prepend_scheme \"%s\" is not supported", scheme));
  }
  if (scheme != "never") {
    spec.space_prefix = scheme == "first" ? SpacePrefix::kFirst : SpacePrefix::kMissing;
  }
  if (member(step, "split") != false) spec.pre_tokenizer = PreTokenizer::kSpaces;
  return absl::OkStatus();
}

absl::Status read_pre_tokenizer(const nlohmann::json& root, TokenizerSpec& spec) {
  bool split = false, byte_level = false, metaspace = false, use_regex = true;
  for (const nlohmann::json* step : steps_of(member(root, "pre_tokenizer"), "pretokenizers")) {
    const std::string type = text_of(member(*step, "type"));
    absl::Status status;
    if (type == "Split" && !split && !byte_level && !spec.byte_fallback) {
      status = read_split(*step, spec);
      split = true;
    } else if (type == "Digits" && !split && !byte_level && !spec.byte_fallback) {
      if (member(*step, "individual_digits") != true) {
        return bad("the pre-tokenizer \"Digits\" is supported with individual_digits alone");
      }
      spec.single_digits = true;
    } else if (type == "ByteLevel" && !byte_level && !spec.byte_fallback) {
      if (member(*step, "add_prefix_space") == true) {
        return bad("add_prefix_space is not supported");
      }
      use_regex = member(*step, "use_regex") != false;
      byte_level = true;
    } else if (type == "Metaspace" && spec.byte_fallback && !metaspace) {
      status = read_metaspace(*step, spec);
      metaspace = true;
    } else {
      return bad(absl::StrFormat("the pre-tokenizer \"%s\" is not supported here", type));
    }
    if (!status.ok()) return status;
  }
  if (!spec.byte_fallback && (!byte_level || split == use_regex)) {
    return bad("the pre-tokenizer is not one of GPT-2's, Llama 3's, Qwen 2's and SmolLM's");
  }
  return absl::OkStatus();
}

// How ids become text again follows from the model; only a space at the start may be left out.
absl::Status read_decoder(const nlohmann::json& root, TokenizerSpec& spec) {
  for (const nlohmann::json* step : steps_of(member(root, "decoder"), "decoders")) {
    const std::string type = text_of(member(*step, "type"));
    const bool fits = type == "ByteLevel" ? !spec.byte_fallback : spec.byte_fallback;
    if (type == "Strip" && fits && text_of(member(*step, "content")) == " " &&
        member(*step, "stop") == 0) {
      spec.strip_space = member(*step, "start") != 0;
    } else if (type == "Metaspace" && fits) {
      spec.strip_space = text_of(member(*step, "prepend_scheme")) != "never";
    } else if (!fits || (type != "ByteLevel" && type != "Replace" && type != "ByteFallback" &&
                         type != "Fuse")) {
      return bad(absl::StrFormat("the decoder \"%s\" is not supported here", type));
    }
  }
  return absl::OkStatus();
}

// TemplateProcessing "<bos> $A" puts one token in front; ByteLevel changes no ids.
absl::Status read_post_processor(const nlohmann::json& root, TokenizerSpec& spec) {
  for (const nlohmann::json* step : steps_of(member(root, "post_processor"), "processors")) {
    const std::string type = text_of(member(*step, "type"));
    if (type == "ByteLevel") continue;
    if (type != "TemplateProcessing") {
      return bad(absl::StrFormat("the post-processor \"%s\" is not supported", type));
    }
    const nlohmann::json& single = member(*step, "single");
    const bool text_only = single.is_array() && single.size() == 1;
    const bool prefixed = single.is_array() && single.size() == 2;
    if (!(text_only || prefixed) || !single.back().contains("Sequence")) {
      return bad("the post-processor's template is not \"[token] text\"");
    }
    if (!prefixed) continue;
    const std::string name = text_of(member(member(single[0], "SpecialToken"), "id"));
    for (const AddedToken& token : spec.added_tokens) {
      if (token.text == name) spec.prepend_id = token.id;
    }
    // The template's own id counts, whatever id the token has.
    const nlohmann::json& ids =
        member(member(member(*step, "special_tokens"), name.c_str()), "ids");
    if (ids.is_array() && ids.size() == 1 && ids[0].is_number_integer()) {
      spec.prepend_id =
          static_cast<int32_t>(std::clamp<int64_t>(ids[0].get<int64_t>(), -1, kMaxVocab));
    }
    if (spec.prepend_id < 0) {
      return bad(absl::StrFormat("the post-processor's token \"%s\" does not exist", name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::parse(std::string_view text,
                                           const std::vector<AddedToken>& more) {
  absl::StatusOr<nlohmann::json> root = parse_json(text, "tokenizer.json");
  if (!root.ok()) return root.status();
  const nlohmann::json& model = member(*root, "model");
  const std::string type = text_of(member(model, "type"));
  // Files from before the field was written are BPE if they have merges.
  if (type != "BPE" && !(type.empty() && member(model, "merges").is_array())) {
    return bad(absl::StrFormat("the model type \"%s\" is not supported: only \"BPE\" is", type));
  }
  if (!is_null(member(model, "dropout"))) return bad("dropout is not supported");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!text_of(member(model, key)).empty()) {
      return bad(absl::StrFormat("%s is not supported", key));
    }
  }
  TokenizerSpec spec;
  spec.ignore_merges = member(model, "ignore_merges") == true;
  spec.byte_fallback = member(model, "byte_fallback") == true;
  spec.fuse_unknown = member(model, "fuse_unk") == true;
  absl::Status status = read_vocab(model, spec);
  if (status.ok()) status = read_added(*root, more, spec);
  if (status.ok()) status = read_merges(model, spec);
  if (status.ok()) status = read_unknown(model, spec);
  if (status.ok()) status = read_normalizer(*root, spec);
  if (status.ok()) status = read_pre_tokenizer(*root, spec);
  if (status.ok()) status = read_decoder(*root, spec);
  if (status.ok()) status = read_post_processor(*root, spec);
  if (!status.ok()) return status;
  absl::StatusOr<Tokenizer> tokenizer = create(std::move(spec));
  if (!tokenizer.ok()) return bad(std::string(tokenizer.status().message()));
  return tokenizer;
}

// tokenizer.json as the Hugging Face `tokenizers` library reads it.

namespace {

using Json = nlohmann::ordered_json;

Json byte_level(bool use_regex) {
  return Json{{"type", "ByteLevel"},
              {"add_prefix_space", false},
              {"trim_offsets", true},
              {"use_regex", use_regex}};
}

Json replace(std::string_view from, std::string_view to) {
  return {{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
}

Json spaces_to_metaspaces() {
  const Json prepend = {{"type", "Prepend"}, {"prepend", kMetaspace}};
  return {{"type", "Sequence"}, {"normalizers", Json::array({prepend, replace(" ", kMetaspace)})}};
}

Json metaspace(const TokenizerSpec& s) {
  const char* scheme = s.space_prefix == SpacePrefix::kMissing ? "always"
                       : s.space_prefix == SpacePrefix::kFirst ? "first"
                                                               : "never";
  return {{"type", "Metaspace"},
          {"replacement", kMetaspace},
          {"prepend_scheme", scheme},
          {"split", s.pre_tokenizer == PreTokenizer::kSpaces}};
}

Json pre_tokenizer(const TokenizerSpec& s) {
  if (s.byte_fallback) {
    return s.space_prefix == SpacePrefix::kEvery ? Json() : metaspace(s);
  }
  Json steps = Json::array();
  if (s.single_digits) steps.push_back({{"type", "Digits"}, {"individual_digits", true}});
  const bool gpt2 = s.pre_tokenizer == PreTokenizer::kGpt2;
  if (!gpt2) {
    const bool llama3 = s.pre_tokenizer == PreTokenizer::kLlama3;
    steps.push_back({{"type", "Split"},
                     {"pattern", {{"Regex", llama3 ? kLlama3Pattern : kQwen2Pattern}}},
                     {"behavior", "Isolated"},
                     {"invert", false}});
  }
  steps.push_back(byte_level(gpt2));
  if (steps.size() == 1) return steps[0];
  return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

Json character_decoder(bool strip_space) {
  Json steps =
      Json::array({replace(kMetaspace, " "), {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  if (strip_space) {
    steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  return {{"type", "Sequence"}, {"decoders", steps}};
}

}  // namespace

std::string Tokenizer::to_json() const {
  const TokenizerSpec& s = spec();
  const ByteAlphabet& alphabet = ByteAlphabet::get();
  Json added = Json::array(), vocab = Json::object(), merges = Json::array();
  std::vector<AddedToken> sorted = s.added_tokens;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  const auto write = [&](const std::string& token) {
    return s.byte_fallback ? token : alphabet.write(token);
  };
  std::vector<std::string> names(s.tokens.size());  // the vocabulary, by id
  std::transform(s.tokens.begin(), s.tokens.end(), names.begin(), write);
  for (const AddedToken& token : sorted) {
    added.push_back({{"id", token.id},
                     {"content", token.text},
                     {"single_word", token.single_word},
                     {"lstrip", token.lstrip},
                     {"rstrip", token.rstrip},
                     {"normalized", token.normalized},
                     {"special", token.special}});
    // The library gives an added token that is not in the vocabulary an id of its own choice.
    std::string bytes = token.text, &name = names[static_cast<size_t>(token.id)];
    if (!s.byte_fallback && !alphabet.read(token.text, bytes)) bytes = token.text;
    const std::string& there = s.tokens[static_cast<size_t>(token.id)];
    if (there.empty() || there == bytes || there == token.text) name = token.text;
  }
  for (size_t id = 0; id < names.size(); ++id) {
    if (!names[id].empty()) vocab[names[id]] = id;
  }
  for (const auto& [a, b] : s.merges) {
    merges.push_back(write(s.tokens[a]) + " " + write(s.tokens[b]));
  }
  Json pre = pre_tokenizer(s), normalizer = nullptr;
  if (s.nfc) normalizer = {{"type", "NFC"}};
  if (s.space_prefix == SpacePrefix::kEvery) normalizer = spaces_to_metaspaces();
  Json post = s.byte_fallback ? Json() : byte_level(true);
  if (s.prepend_id >= 0) {
    std::string name = s.tokens[s.prepend_id];
    for (const AddedToken& token : sorted) name = token.id == s.prepend_id ? token.text : name;
    const Json token = {{"SpecialToken", {{"id", name}, {"type_id", 0}}}};
    const auto sequence = [](const char* id, int type) {
      return Json{{"Sequence", {{"id", id}, {"type_id", type}}}};
    };
    const Json ids = Json::array({s.prepend_id}), tokens = Json::array({name});
    post = {{"type", "TemplateProcessing"},
            {"single", Json::array({token, sequence("A", 0)})},
            {"pair", Json::array({token, sequence("A", 0), token, sequence("B", 1)})},
            {"special_tokens", {{name, {{"id", name}, {"ids", ids}, {"tokens", tokens}}}}}};
  }
  const Json root = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added},
      {"normalizer", normalizer},
      {"pre_tokenizer", pre},
      {"post_processor", post},
      {"decoder", s.byte_fallback ? character_decoder(s.strip_space) : byte_level(true)},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", s.unknown_id < 0 ? Json() : Json(s.tokens[s.unknown_id])},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", s.fuse_unknown},
        {"byte_fallback", s.byte_fallback},
        {"ignore_merges", s.ignore_merges},
        {"vocab", vocab},
        {"merges", merges}}}};
  // Tokens of special ids may hold any bytes; whatever is not UTF-8 is replaced, not thrown at us.
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace baton::engine
