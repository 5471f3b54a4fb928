// tokenizer.json as the Hugging Face `tokenizers` library reads it.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/tokenizer/token_text.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {
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
