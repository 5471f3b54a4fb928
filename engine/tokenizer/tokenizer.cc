// BPE: merging within words by rank, added tokens, and decoding of streams.
#include "engine/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <queue>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "engine/files/files.h"
#include "engine/tokenizer/pre_tokenizer.h"
#include "engine/tokenizer/special_tokens.h"
#include "engine/tokenizer/token_text.h"

namespace baton::engine {
namespace {

constexpr size_t kMaxFileBytes = size_t{64} << 20;

struct Merge {
  int32_t rank;
  int32_t id;
};

uint64_t pair_key(int32_t a, int32_t b) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(a)) << 32) | static_cast<uint32_t>(b);
}

}  // namespace

struct Tokenizer::Impl {
  TokenizerSpec spec;
  std::array<int32_t, 256> byte_ids{};
  absl::flat_hash_map<uint64_t, Merge> merges;
  absl::flat_hash_map<std::string, int32_t> ids;  // of the vocabulary
  std::vector<bool> special;
  std::vector<std::string> output;  // the text of each id
  AddedTokens raw_added, normalized_added;

  absl::Status map_tokens();
  absl::Status map_bytes();
  absl::Status map_merges();
  std::vector<int32_t> symbols(std::string_view word) const;
  void encode_word(std::string_view word, std::vector<int32_t>& out) const;
  void encode_words(std::string_view text, std::vector<int32_t>& out) const;
  void encode_plain(std::string_view text, bool first, std::vector<int32_t>& out) const;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::Status Tokenizer::Impl::map_tokens() {
  const auto size = static_cast<int32_t>(spec.tokens.size());
  const auto in_range = [size](int32_t id) { return id >= 0 && id < size; };
  special.assign(spec.tokens.size(), false);
  output = spec.tokens;
  for (std::string& token : output) {
    if (!spec.byte_fallback) break;
    const int byte = byte_of_token(token);
    token =
        byte >= 0 ? std::string(1, static_cast<char>(byte)) : replace_all(token, kMetaspace, " ");
  }
  for (AddedToken& token : spec.added_tokens) {
    if (!in_range(token.id) || (token.text.empty() && spec.tokens[token.id].empty())) {
      return absl::InvalidArgumentError(
          absl::StrFormat("added token %d is not among the %d tokens", token.id, size));
    }
    if (token.text.empty()) token.text = spec.tokens[token.id];
    special[token.id] = token.special;
    output[token.id] = token.text;
  }
  for (const int32_t id : {spec.prepend_id, spec.unknown_id}) {
    if (id == -1 || in_range(id)) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("the token put before text, or for unknown text, %d, is out of range", id));
  }
  for (int32_t id = 0; id < size; ++id) {
    if (!spec.tokens[id].empty()) ids.emplace(spec.tokens[id], id);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Impl::map_bytes() {
  int found = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const auto it = ids.find(spec.byte_fallback ? absl::StrFormat("<0x%02X>", byte)
                                                : std::string(1, static_cast<char>(byte)));
    byte_ids[byte] = it != ids.end() ? it->second : -1;
    found += it != ids.end() ? 1 : 0;
  }
  // Some vocabularies lack bytes that text has never; then they are left out.
  if (found >= 128 || (spec.byte_fallback && spec.unknown_id >= 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "only %d of 256 bytes have a token: this is not a byte-level vocabulary", found));
}

absl::Status Tokenizer::Impl::map_merges() {
  const auto size = static_cast<int32_t>(spec.tokens.size());
  const auto in_range = [size](int32_t id) { return id >= 0 && id < size; };
  int32_t rank = 0;
  for (const auto& [a, b] : spec.merges) {
    const auto it =
        in_range(a) && in_range(b) ? ids.find(spec.tokens[a] + spec.tokens[b]) : ids.end();
    if (it == ids.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "merge %d (tokens %d and %d) makes no token of the vocabulary", rank, a, b));
    }
    merges.emplace(pair_key(a, b), Merge{rank++, it->second});
  }
  return absl::OkStatus();
}

absl::StatusOr<Tokenizer> Tokenizer::create(TokenizerSpec spec) {
  auto impl = std::make_unique<Impl>();
  impl->spec = std::move(spec);
  absl::Status status = impl->map_tokens();
  if (status.ok()) status = impl->map_bytes();
  if (status.ok()) status = impl->map_merges();
  if (!status.ok()) return status;
  impl->raw_added = AddedTokens(impl->spec, false);
  impl->normalized_added = AddedTokens(impl->spec, true);
  return Tokenizer(std::move(impl));
}

absl::StatusOr<Tokenizer> Tokenizer::load(const std::string& path) {
  absl::StatusOr<std::string> text = read_file(path, kMaxFileBytes);
  if (!text.ok()) return text.status();
  const size_t name = path.rfind('/');
  const absl::StatusOr<SpecialTokens> beside =
      load_special_tokens(name == std::string::npos ? "." : path.substr(0, name + 1));
  if (!beside.ok()) return beside.status();
  absl::StatusOr<Tokenizer> tokenizer = parse(*text, beside->added);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrFormat("%s: %s", path, std::string(tokenizer.status().message())));
  }
  return tokenizer;
}

// The first tokens for merging: one for each byte, or for each character that has one.
std::vector<int32_t> Tokenizer::Impl::symbols(std::string_view word) const {
  std::vector<int32_t> out;
  out.reserve(word.size());
  const auto push_bytes = [&](std::string_view bytes) {
    for (const char c : bytes) {
      const int32_t id = byte_ids[static_cast<uint8_t>(c)];
      if (id >= 0) out.push_back(id);
    }
  };
  if (!spec.byte_fallback) {
    push_bytes(word);
    return out;
  }
  bool unknown_before = false;
  for (size_t at = 0, bytes = 0; at < word.size(); at += bytes) {
    bytes = decode_character(word, at).bytes;
    const std::string_view character = word.substr(at, bytes);
    const auto it = ids.find(std::string(character));
    const bool in_bytes = std::all_of(character.begin(), character.end(), [&](char c) {
      return byte_ids[static_cast<uint8_t>(c)] >= 0;
    });
    const bool unknown = it == ids.end() && !in_bytes;
    if (it != ids.end()) {
      out.push_back(it->second);
    } else if (in_bytes) {
      push_bytes(character);
    } else if (spec.unknown_id >= 0 && !(spec.fuse_unknown && unknown_before)) {
      out.push_back(spec.unknown_id);
    }
    unknown_before = unknown;
  }
  return out;
}

// Symbols form a linked list; a heap yields the merge of lowest rank, leftmost first. Entries
// whose symbols have changed since are skipped. n log n, however long the word.
void Tokenizer::Impl::encode_word(std::string_view word, std::vector<int32_t>& out) const {
  if (spec.ignore_merges) {
    if (const auto it = ids.find(std::string(word)); it != ids.end()) {
      out.push_back(it->second);
      return;
    }
  }
  struct Symbol {
    int32_t id;
    int32_t prev;
    int32_t next;
  };
  struct Candidate {
    int32_t rank;
    int32_t left;
    int32_t left_id;
    int32_t right_id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const std::vector<int32_t> start = symbols(word);
  const auto n = static_cast<int32_t>(start.size());
  std::vector<Symbol> symbols(start.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](int32_t left) {
    if (left < 0 || symbols[left].next == n) return;
    const int32_t a = symbols[left].id, b = symbols[symbols[left].next].id;
    if (const auto it = merges.find(pair_key(a, b)); it != merges.end()) {
      candidates.push({it->second.rank, left, a, b});
    }
  };
  for (int32_t i = 0; i < n; ++i) {
    symbols[i] = {start[i], i - 1, i + 1};
  }
  for (int32_t i = 0; i < n; ++i) consider(i);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Symbol& left = symbols[best.left];
    if (left.id != best.left_id || left.next == n || symbols[left.next].id != best.right_id) {
      continue;
    }
    const int32_t right = left.next;
    left.id = merges.at(pair_key(best.left_id, best.right_id)).id;
    left.next = symbols[right].next;
    symbols[right].id = -1;
    if (left.next < n) symbols[left.next].prev = best.left;
    consider(left.prev);
    consider(best.left);
  }
  for (int32_t i = 0; i < n; i = symbols[i].next) out.push_back(symbols[i].id);
}

void Tokenizer::Impl::encode_words(std::string_view text, std::vector<int32_t>& out) const {
  while (!text.empty()) {
    const size_t length = next_word(text, spec.pre_tokenizer);
    encode_word(text.substr(0, length), out);
    text.remove_prefix(length);
  }
}

// Normalized text between added tokens; `first`: the text begins with it.
void Tokenizer::Impl::encode_plain(std::string_view text, bool first,
                                   std::vector<int32_t>& out) const {
  if (spec.byte_fallback) {
    std::string spaced = spaces_as_metaspaces(text);
    const bool may = spec.space_prefix == SpacePrefix::kMissing ||
                     (spec.space_prefix == SpacePrefix::kFirst && first);
    if (may && !spaced.starts_with(kMetaspace)) spaced.insert(0, kMetaspace);
    encode_words(spaced, out);
    return;
  }
  size_t begin = 0;
  for (size_t at = 0; spec.single_digits && at < text.size();) {
    const Character c = decode_character(text, at);
    if (c.valid && is_number(c.code)) {
      encode_words(text.substr(begin, at - begin), out);
      encode_words(text.substr(at, c.bytes), out);
      begin = at + c.bytes;
    }
    at += c.bytes;
  }
  encode_words(text.substr(begin), out);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> out;
  const Impl& m = *impl_;
  if (options.add_prefix && m.spec.prepend_id >= 0) out.push_back(m.spec.prepend_id);
  for (const AddedTokens::Piece& raw : m.raw_added.split(text, options.parse_special)) {
    if (raw.id >= 0) {
      out.push_back(raw.id);
      continue;
    }
    const std::string normal = normalize(m.spec, raw.text);
    for (const auto& piece : m.normalized_added.split(normal, options.parse_special)) {
      if (piece.id >= 0) {
        out.push_back(piece.id);
      } else {
        const bool first = raw.text.data() == text.data() && piece.text.data() == normal.data();
        m.encode_plain(piece.text, first, out);
      }
    }
  }
  return out;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  std::string out;
  for (int32_t id : ids) {
    if (!is_special(id)) out += token_bytes(id);
  }
  if (impl_->spec.strip_space && out.starts_with(' ')) out.erase(0, 1);
  return out;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return impl_->output[id];
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[id];
}

int32_t Tokenizer::special_id(std::string_view text) const {
  for (const AddedToken& token : impl_->spec.added_tokens) {
    if (token.text == text) return token.id;
  }
  return -1;
}

int Tokenizer::vocab_size() const { return static_cast<int>(impl_->spec.tokens.size()); }
const TokenizerSpec& Tokenizer::spec() const { return impl_->spec; }

std::string StreamDecoder::push(int32_t id) {
  if (!tokenizer_->is_special(id)) pending_ += tokenizer_->token_bytes(id);
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const Character c = decode_character(pending_, at);
    if (!c.valid) {
      // Cut off, or wrong? A lead byte with only right bytes behind it may still become whole.
      const uint8_t lead = static_cast<uint8_t>(pending_[at]);
      const size_t need = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
      bool hopeful = lead >= 0xc2 && lead <= 0xf4 && pending_.size() - at < need;
      for (size_t i = at + 1; i < pending_.size() && hopeful; ++i) {
        hopeful = (static_cast<uint8_t>(pending_[i]) & 0xc0) == 0x80;
      }
      if (hopeful) break;
      out += "\xef\xbf\xbd";
    } else {
      out.append(pending_, at, c.bytes);
    }
    at += c.bytes;
  }
  pending_.erase(0, at);
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = pending_.empty() ? "" : "\xef\xbf\xbd";
  pending_.clear();
  return out;
}

}  // namespace baton::engine
