// tokenizer.json of the Hugging Face `tokenizers` library: what is understood, and nothing else.
#include <algorithm>
#include <array>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "engine/files/json_fields.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kMaxVocab = 1 << 22;
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

absl::Status bad(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("tokenizer.json: %s", what));
}

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else {  // the stand-ins end below 0x800
    out += static_cast<char>(0xc0 | (code >> 6));
    out += static_cast<char>(0x80 | (code & 0x3f));
  }
}

// Byte-level files write every byte as a printable character: itself, or one from U+0100 on.
struct ByteAlphabet {
  std::array<uint32_t, 256> of_byte{};
  absl::flat_hash_map<uint32_t, uint8_t> to_byte;

  ByteAlphabet() {
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
      of_byte[b] = printable ? b : next++;
      to_byte[of_byte[b]] = static_cast<uint8_t>(b);
    }
  }
  static const ByteAlphabet& get() {
    static const ByteAlphabet alphabet;
    return alphabet;
  }
  std::string write(std::string_view bytes) const {
    std::string out;
    for (char c : bytes) append_utf8(out, of_byte[static_cast<uint8_t>(c)]);
    return out;
  }
  // False where a character stands for no byte.
  bool read(std::string_view text, std::string& bytes) const {
    bytes.clear();
    for (size_t at = 0; at < text.size();) {
      const Character c = decode_character(text, at);
      const auto it = c.valid ? to_byte.find(c.code) : to_byte.end();
      if (it == to_byte.end()) return false;
      bytes += static_cast<char>(it->second);
      at += c.bytes;
    }
    return true;
  }
};

bool is_null(const nlohmann::json& value) { return value.is_null(); }
std::string text_of(const nlohmann::json& value) {
  return value.is_string() ? value.get<std::string>() : std::string();
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
    // A control token may be listed here too; added_tokens settles its text.
    if (!ByteAlphabet::get().read(text, bytes)) bytes = text;
    const auto at = id.get<size_t>();
    if (at >= spec.tokens.size()) spec.tokens.resize(at + 1);
    if (!spec.tokens[at].empty()) return bad(absl::StrFormat("two tokens have the id %u", at));
    spec.tokens[at] = bytes;
  }
  return absl::OkStatus();
}

absl::Status read_added(const nlohmann::json& root, TokenizerSpec& spec) {
  const nlohmann::json& added = member(root, "added_tokens");
  if (is_null(added)) return absl::OkStatus();
  if (!added.is_array()) return bad("added_tokens is not a list");
  for (const nlohmann::json& token : added) {
    const nlohmann::json& id = member(token, "id");
    const std::string content = text_of(member(token, "content"));
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= kMaxVocab ||
        content.empty()) {
      return bad("an added token lacks a valid id or content");
    }
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (member(token, flag) == true) {
        return bad(
            absl::StrFormat("added token \"%s\" uses %s, which is not supported", content, flag));
      }
    }
    if (member(token, "special") == false) {
      return bad(
          absl::StrFormat("added token \"%s\" is not special, which is not supported", content));
    }
    const auto at = id.get<size_t>();
    if (at >= spec.tokens.size()) spec.tokens.resize(at + 1);
    spec.tokens[at] = content;
    spec.special_ids.push_back(static_cast<int32_t>(at));
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
  for (int32_t id : spec.special_ids) ids.erase(spec.tokens[id]);
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
          !text->empty() && ByteAlphabet::get().read(*text, bytes) ? ids.find(bytes) : ids.end();
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

absl::Status read_pre_tokenizer(const nlohmann::json& root, TokenizerSpec& spec) {
  const nlohmann::json& pre = member(root, "pre_tokenizer");
  std::vector<const nlohmann::json*> steps = {&pre};
  if (text_of(member(pre, "type")) == "Sequence") {
    steps.clear();
    for (const nlohmann::json& step : member(pre, "pretokenizers")) steps.push_back(&step);
  }
  bool split = false, byte_level = false, use_regex = true;
  for (const nlohmann::json* step : steps) {
    const std::string type = text_of(member(*step, "type"));
    if (type == "Split" && !split) {
      const std::string pattern = text_of(member(member(*step, "pattern"), "Regex"));
      if (pattern != kLlama3Pattern && pattern != kQwen2Pattern) {
        return bad(absl::StrFormat("the split pattern \"%s\" is not supported", pattern));
      }
      if (text_of(member(*step, "behavior")) != "Isolated" || member(*step, "invert") == true) {
        return bad("the split does something else than isolate the words of its pattern");
      }
      spec.pre_tokenizer = pattern == kLlama3Pattern ? PreTokenizer::kLlama3 : PreTokenizer::kQwen2;
      split = true;
    } else if (type == "ByteLevel" && !byte_level) {
      if (member(*step, "add_prefix_space") == true) {
        return bad("add_prefix_space is not supported");
      }
      use_regex = member(*step, "use_regex") != false;
      byte_level = true;
    } else {
      return bad(absl::StrFormat("the pre-tokenizer \"%s\" is not supported", type));
    }
  }
  if (!byte_level || split == use_regex) {
    return bad("the pre-tokenizer is not one of GPT-2's, Llama 3's and Qwen 2's");
  }
  return absl::OkStatus();
}

// TemplateProcessing "<bos> $A" puts one token in front; ByteLevel changes no ids.
absl::Status read_post_processor(const nlohmann::json& root, TokenizerSpec& spec) {
  const nlohmann::json& post = member(root, "post_processor");
  if (is_null(post)) return absl::OkStatus();
  std::vector<const nlohmann::json*> steps = {&post};
  if (text_of(member(post, "type")) == "Sequence") {
    steps.clear();
    for (const nlohmann::json& step : member(post, "processors")) steps.push_back(&step);
  }
  for (const nlohmann::json* step : steps) {
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
    for (int32_t id : spec.special_ids) {
      if (spec.tokens[id] == name) spec.prepend_id = id;
    }
    if (spec.prepend_id < 0) {
      return bad(absl::StrFormat("the post-processor's token \"%s\" does not exist", name));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Tokenizer> Tokenizer::parse(std::string_view text) {
  absl::StatusOr<nlohmann::json> root = parse_json(text, "tokenizer.json");
  if (!root.ok()) return root.status();
  const nlohmann::json& model = member(*root, "model");
  const std::string type = text_of(member(model, "type"));
  // Files from before the field was written are BPE if they have merges.
  if (type != "BPE" && !(type.empty() && member(model, "merges").is_array())) {
    return bad(
        absl::StrFormat("the model type \"%s\" is not supported: only byte-level BPE is", type));
  }
  if (!is_null(member(*root, "normalizer"))) return bad("normalizers are not supported");
  if (member(model, "byte_fallback") == true || !is_null(member(model, "dropout"))) {
    return bad("byte_fallback and dropout are not supported");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!text_of(member(model, key)).empty()) {
      return bad(absl::StrFormat("%s is not supported", key));
    }
  }
  TokenizerSpec spec;
  spec.ignore_merges = member(model, "ignore_merges") == true;
  absl::Status status = read_vocab(model, spec);
  if (status.ok()) status = read_added(*root, spec);
  if (status.ok()) status = read_merges(model, spec);
  if (status.ok()) status = read_pre_tokenizer(*root, spec);
  if (status.ok()) status = read_post_processor(*root, spec);
  if (!status.ok()) return status;
  absl::StatusOr<Tokenizer> tokenizer = create(std::move(spec));
  if (!tokenizer.ok()) return bad(std::string(tokenizer.status().message()));
  return tokenizer;
}

std::string Tokenizer::to_json() const {
  const TokenizerSpec& s = spec();
  const ByteAlphabet& alphabet = ByteAlphabet::get();
  Json added = Json::array(), vocab = Json::object(), merges = Json::array();
  std::vector<int32_t> special = s.special_ids;
  std::sort(special.begin(), special.end());
  for (int32_t id : special) {
    added.push_back({{"id", id},
                     {"content", s.tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  for (int32_t id = 0; id < vocab_size(); ++id) {
    if (!s.tokens[id].empty() && !is_special(id)) vocab[alphabet.write(s.tokens[id])] = id;
  }
  for (const auto& [a, b] : s.merges) {
    merges.push_back(alphabet.write(s.tokens[a]) + " " + alphabet.write(s.tokens[b]));
  }
  const auto byte_level = [](bool use_regex) {
    return Json{{"type", "ByteLevel"},
                {"add_prefix_space", false},
                {"trim_offsets", true},
                {"use_regex", use_regex}};
  };
  Json pre = byte_level(true);
  if (s.pre_tokenizer != PreTokenizer::kGpt2) {
    const bool llama3 = s.pre_tokenizer == PreTokenizer::kLlama3;
    Json split = {{"type", "Split"},
                  {"pattern", {{"Regex", std::string(llama3 ? kLlama3Pattern : kQwen2Pattern)}}},
                  {"behavior", "Isolated"},
                  {"invert", false}};
    pre = {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level(false)})}};
  }
  Json post = byte_level(true);
  if (s.prepend_id >= 0) {
    const std::string& name = s.tokens[s.prepend_id];
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
  const Json root = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", pre},
                     {"post_processor", post},
                     {"decoder", byte_level(true)},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", s.ignore_merges},
                       {"vocab", vocab},
                       {"merges", merges}}}};
  // Tokens of special ids may hold any bytes; whatever is not UTF-8 is replaced, not thrown at us.
  return root.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace baton::engine
