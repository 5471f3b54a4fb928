// Writes and parses the JSON lines that tell what a prefix cache holds.
#include "engine/serve/cache/cache_events.h"

#include <openssl/sha.h>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {

static_assert(std::endian::native == std::endian::little, "hashes are defined over little endian");

BlockHash chain_hash(const BlockHash& parent, std::string_view bytes) {
  std::string input(reinterpret_cast<const char*>(&parent), sizeof(parent));
  input.append(bytes);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const unsigned char*>(input.data()), input.size(), digest.data());
  BlockHash hash;
  std::memcpy(&hash, digest.data(), sizeof(hash));
  return hash;
}

BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens) {
  return chain_hash(
      parent, std::string_view(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()));
}

BlockHash model_root(std::string_view fingerprint) {
  // No chain goes on from zeros: a fingerprint cannot be taken for a block's tokens.
  return chain_hash(BlockHash{}, fingerprint);
}

void extend_chain(std::span<const int32_t> tokens, int block_tokens, const BlockHash& root,
                  std::vector<BlockHash>* chain) {
  const size_t full = tokens.size() / block_tokens;
  while (chain->size() < full) {
    const BlockHash parent = chain->empty() ? root : chain->back();
    chain->push_back(
        chain_hash(parent, tokens.subspan(chain->size() * block_tokens, block_tokens)));
  }
}

namespace {

constexpr size_t kNameDigits = 2 * sizeof(BlockHash);

void append_names(const char* key, const std::vector<BlockHash>& hashes, std::string* out) {
  absl::StrAppend(out, ",\"", key, "\":[");
  for (size_t i = 0; i < hashes.size(); ++i) {
    absl::StrAppend(out, i == 0 ? "\"" : ",\"", block_name(hashes[i]), "\"");
  }
  *out += ']';
}

absl::Status read_names(const nlohmann::json& line, const char* key, std::vector<BlockHash>* out) {
  const nlohmann::json& names = member(line, key);
  if (!names.is_array()) {
    return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" must be an array of names"));
  }
  out->reserve(names.size());
  for (const nlohmann::json& name : names) {
    const auto hash =
        name.is_string() ? parse_block_name(name.get_ref<const std::string&>()) : std::nullopt;
    if (!hash.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("\"", key,
                                                     "\" has an entry that is not a block's name, ",
                                                     kNameDigits, " hexadecimal digits"));
    }
    out->push_back(*hash);
  }
  return absl::OkStatus();
}

// How its names are made, if that is a way we know.
absl::Status read_origin(const nlohmann::json& line, CacheNews* news) {
  const auto size = int_field(line, "block_tokens", 1, 1 << 20, 0);
  if (!size.ok()) return size.status();
  const auto root = string_field(line, "root", "");
  if (!root.ok()) return root.status();
  const auto model = string_field(line, "model", "");
  if (!model.ok()) return model.status();
  if (*size != kBlockTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("its blocks have ", *size, " tokens, so their names differ from ours, with ",
                     kBlockTokens, " tokens"));
  }
  const std::optional<BlockHash> parsed = parse_block_name(*root);
  if (!parsed.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"root\" must be a name of ", kNameDigits, " hexadecimal digits"));
  }
  news->root = *parsed;
  news->model = *model;
  return absl::OkStatus();
}

}  // namespace

std::string block_name(const BlockHash& hash) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(&hash), sizeof(hash)});
}

std::optional<BlockHash> parse_block_name(std::string_view text) {
  if (text.size() != kNameDigits) return std::nullopt;
  for (const char digit : text) {
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(digit))) return std::nullopt;
  }
  const std::string bytes = absl::HexStringToBytes(absl::string_view(text.data(), text.size()));
  BlockHash hash;
  std::memcpy(&hash, bytes.data(), sizeof(hash));
  return hash;
}

std::string cache_line(const CacheNews& news, std::string_view model) {
  std::string line = "{";
  if (news.snapshot) {
    absl::StrAppend(&line, "\"block_tokens\":", kBlockTokens, ",\"root\":\"",
                    block_name(model_root(model)), "\",\"model\":", nlohmann::json(model).dump(),
                    ",");
  }
  absl::StrAppend(&line, "\"changes\":", news.changes);
  if (!news.snapshot) append_names("removed", news.removed, &line);
  append_names(news.snapshot ? "blocks" : "stored", news.stored, &line);
  line += "}\n";
  return line;
}

absl::StatusOr<CacheNews> parse_cache_line(std::string_view text) {
  const absl::StatusOr<nlohmann::json> line = parse_json(text, "a line about a cache");
  if (!line.ok()) return line.status();
  CacheNews news;
  news.snapshot = !member(*line, "blocks").is_null();
  const auto changes = int_field(*line, "changes", 0, INT64_MAX, -1);
  if (!changes.ok()) return changes.status();
  if (*changes < 0) return absl::InvalidArgumentError("\"changes\" is missing");
  news.changes = static_cast<uint64_t>(*changes);
  if (news.snapshot) {
    if (absl::Status status = read_origin(*line, &news); !status.ok()) return status;
    if (absl::Status status = read_names(*line, "blocks", &news.stored); !status.ok()) {
      return status;
    }
    return news;
  }
  if (absl::Status status = read_names(*line, "removed", &news.removed); !status.ok()) {
    return status;
  }
  if (absl::Status status = read_names(*line, "stored", &news.stored); !status.ok()) return status;
  return news;
}

}  // namespace baton::engine::serve
