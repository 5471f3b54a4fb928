// Byte-level BPE: merging within words by rank, special tokens, and decoding of streams.
#include "engine/tokenizer/tokenizer.h"

#include <algorithm>
#include <array>
#include <queue>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "engine/files/files.h"
#include "engine/tokenizer/pre_tokenizer.h"

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
  absl::flat_hash_map<std::string, int32_t> ids;  // of ordinary tokens
  std::vector<bool> special;
  std::array<bool, 256> special_first{};  // first bytes of special tokens

  void encode_word(std::string_view word, std::vector<int32_t>& out) const;
  void encode_plain(std::string_view text, std::vector<int32_t>& out) const;
  int32_t special_at(std::string_view text, size_t at) const;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

absl::StatusOr<Tokenizer> Tokenizer::create(TokenizerSpec spec) {
  auto impl = std::make_unique<Impl>();
  const auto size = static_cast<int32_t>(spec.tokens.size());
  const auto in_range = [size](int32_t id) { return id >= 0 && id < size; };
  impl->special.assign(spec.tokens.size(), false);
  for (int32_t id : spec.special_ids) {
    if (!in_range(id) || spec.tokens[id].empty()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("special token %d is not among the %d tokens", id, size));
    }
    impl->special[id] = true;
    impl->special_first[static_cast<uint8_t>(spec.tokens[id][0])] = true;
  }
  if (spec.prepend_id != -1 && !in_range(spec.prepend_id)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the token put before every text, %d, is out of range", spec.prepend_id));
  }
  for (int32_t id = 0; id < size; ++id) {
    if (!impl->special[id] && !spec.tokens[id].empty()) impl->ids.emplace(spec.tokens[id], id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto it = impl->ids.find(std::string(1, static_cast<char>(byte)));
    if (it == impl->ids.end()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("byte 0x%02x has no token: this is not a byte-level vocabulary", byte));
    }
    impl->byte_ids[byte] = it->second;
  }
  int32_t rank = 0;
  for (const auto& [a, b] : spec.merges) {
    const auto it = in_range(a) && in_range(b) ? impl->ids.find(spec.tokens[a] + spec.tokens[b])
                                               : impl->ids.end();
    if (it == impl->ids.end()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "merge %d (tokens %d and %d) makes no token of the vocabulary", rank, a, b));
    }
    impl->merges.emplace(pair_key(a, b), Merge{rank++, it->second});
  }
  impl->spec = std::move(spec);
  return Tokenizer(std::move(impl));
}

absl::StatusOr<Tokenizer> Tokenizer::load(const std::string& path) {
  absl::StatusOr<std::string> text = read_file(path, kMaxFileBytes);
  if (!text.ok()) return text.status();
  absl::StatusOr<Tokenizer> tokenizer = parse(*text);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrFormat("%s: %s", path, std::string(tokenizer.status().message())));
  }
  return tokenizer;
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
  const auto n = static_cast<int32_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](int32_t left) {
    if (left < 0 || symbols[left].next == n) return;
    const int32_t a = symbols[left].id, b = symbols[symbols[left].next].id;
    if (const auto it = merges.find(pair_key(a, b)); it != merges.end()) {
      candidates.push({it->second.rank, left, a, b});
    }
  };
  for (int32_t i = 0; i < n; ++i) {
    symbols[i] = {byte_ids[static_cast<uint8_t>(word[i])], i - 1, i + 1};
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

void Tokenizer::Impl::encode_plain(std::string_view text, std::vector<int32_t>& out) const {
  while (!text.empty()) {
    const size_t length = next_word(text, spec.pre_tokenizer);
    encode_word(text.substr(0, length), out);
    text.remove_prefix(length);
  }
}

// The longest special token at this place, or -1.
int32_t Tokenizer::Impl::special_at(std::string_view text, size_t at) const {
  if (!special_first[static_cast<uint8_t>(text[at])]) return -1;
  int32_t best = -1;
  size_t longest = 0;
  for (int32_t id : spec.special_ids) {
    const std::string& token = spec.tokens[id];
    if (token.size() > longest && text.substr(at, token.size()) == token) {
      best = id;
      longest = token.size();
    }
  }
  return best;
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::vector<int32_t> out;
  if (options.add_prefix && impl_->spec.prepend_id >= 0) out.push_back(impl_->spec.prepend_id);
  size_t begin = 0;
  if (options.parse_special) {
    for (size_t at = 0; at < text.size();) {
      const int32_t id = impl_->special_at(text, at);
      if (id < 0) {
        ++at;
        continue;
      }
      impl_->encode_plain(text.substr(begin, at - begin), out);
      out.push_back(id);
      begin = at += impl_->spec.tokens[id].size();
    }
  }
  impl_->encode_plain(text.substr(begin), out);
  return out;
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  std::string out;
  for (int32_t id : ids) {
    if (!is_special(id)) out += token_bytes(id);
  }
  return out;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return {};
  return impl_->spec.tokens[id];
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[id];
}

int32_t Tokenizer::special_id(std::string_view text) const {
  for (int32_t id : impl_->spec.special_ids) {
    if (impl_->spec.tokens[id] == text) return id;
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
