// Writes and reads batches of KV events in msgpack.
#include "engine/kv_events/batch.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/files/utf8.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine::kv_events {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;  // a batch has 6: [, [{ extra_keys: [ [ ( ...

// Reads along and stops where it gets too deep: the parser calls itself for each level.
class DepthCheck {
 public:
  bool null() { return true; }
  bool boolean(bool) { return true; }
  bool number_integer(json::number_integer_t) { return true; }
  bool number_unsigned(json::number_unsigned_t) { return true; }
  bool number_float(json::number_float_t, const std::string&) { return true; }
  bool string(std::string&) { return true; }
  bool binary(json::binary_t&) { return true; }
  bool key(std::string&) { return true; }
  bool start_object(size_t) { return ++depth_ <= kMaxDepth; }
  bool start_array(size_t) { return ++depth_ <= kMaxDepth; }
  bool end_object() { return --depth_ >= 0; }
  bool end_array() { return --depth_ >= 0; }
  bool parse_error(size_t, const std::string&, const json::exception&) { return false; }

 private:
  int depth_ = 0;
};

absl::Status wrong(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("a batch of KV events: ", view(what)));
}

std::string big_endian(uint64_t number) {
  std::string bytes(sizeof(number), '\0');
  for (size_t i = bytes.size(); i-- > 0; number >>= 8) bytes[i] = static_cast<char>(number & 0xff);
  return bytes;
}

std::optional<SentHash> read_hash(const json& value) {
  if (value.is_binary()) {
    const json::binary_t& bytes = value.get_binary();
    if (bytes.empty()) return std::nullopt;
    return std::string(bytes.begin(), bytes.end());
  }
  if (value.is_number_unsigned()) return big_endian(value.get<uint64_t>());
  if (value.is_number_integer()) {
    return big_endian(static_cast<uint64_t>(value.get<int64_t>()));
  }
  return std::nullopt;
}

// One event's fields, by the names of the newer form or by their places in the older one.
class Fields {
 public:
  explicit Fields(const json& event) : event_(event) {}

  const json& at(const char* name, size_t place) const {
    static const json kNull;
    if (event_.is_object()) return member(event_, name);
    return place != 0 && place < event_.size() ? event_[place] : kNull;
  }
  std::string text(const char* name, size_t place) const {
    const json& value = at(name, place);
    return value.is_string() ? value.get<std::string>() : "";
  }
  absl::StatusOr<std::vector<SentHash>> hashes() const {
    const json& list = at("block_hashes", 1);
    if (!list.is_array()) return wrong("\"block_hashes\" must be an array");
    std::vector<SentHash> out;
    out.reserve(list.size());
    for (const json& value : list) {
      std::optional<SentHash> hash = read_hash(value);
      if (!hash.has_value()) return wrong("\"block_hashes\" must be bytes or whole numbers");
      out.push_back(*std::move(hash));
    }
    return out;
  }
  absl::StatusOr<std::optional<int64_t>> group() const {
    const json& value = at("group_idx", 0);
    if (value.is_null()) return std::optional<int64_t>();
    if (!value.is_number_integer()) return wrong("\"group_idx\" must be a whole number");
    return std::optional<int64_t>(value.get<int64_t>());
  }
  bool remote() const { return text("locality", 0) == "REMOTE"; }

 private:
  const json& event_;
};

absl::Status read_tokens(const json& list, std::vector<int32_t>* tokens) {
  if (!list.is_array()) return wrong("\"token_ids\" must be an array");
  tokens->reserve(list.size());
  for (const json& value : list) {
    // A number too large for the type comes out below 0.
    const int64_t token = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (token < 0 || token > INT32_MAX) {
      return wrong("\"token_ids\" must be whole numbers from 0 to 2147483647");
    }
    tokens->push_back(static_cast<int32_t>(token));
  }
  return absl::OkStatus();
}

// What blocks depend on besides tokens.
absl::Status read_plain(const Fields& fields, BlockStored* stored) {
  const size_t blocks = stored->hashes.size();
  if (!fields.at("lora_id", 5).is_null() || !fields.at("lora_name", 0).is_null()) {
    stored->plain.assign(blocks, false);
  }
  const json& keys = fields.at("extra_keys", 0);
  if (keys.is_null()) return absl::OkStatus();
  if (!keys.is_array() || keys.size() != blocks) {
    return wrong("\"extra_keys\" must have one entry for each block");
  }
  stored->plain.resize(blocks, true);
  for (size_t i = 0; i < blocks; ++i) {
    if (!keys[i].is_null()) stored->plain[i] = false;
  }
  // Where nothing else counts the list is left out, so that equal events compare equal.
  if (std::find(stored->plain.begin(), stored->plain.end(), false) == stored->plain.end()) {
    stored->plain.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<BlockStored> read_stored(const Fields& fields) {
  BlockStored stored;
  auto hashes = fields.hashes();
  if (!hashes.ok()) return hashes.status();
  stored.hashes = *std::move(hashes);
  if (const json& parent = fields.at("parent_block_hash", 2); !parent.is_null()) {
    stored.parent = read_hash(parent);
    if (!stored.parent.has_value()) {
      return wrong("\"parent_block_hash\" must be bytes, a whole number or nil");
    }
  }
  if (absl::Status status = read_tokens(fields.at("token_ids", 3), &stored.tokens); !status.ok()) {
    return status;
  }
  const json& size = fields.at("block_size", 4);
  constexpr int64_t kMaxBlockSize = 1 << 20;
  const int64_t block_size = size.is_number_integer() ? size.get<int64_t>() : -1;
  if (block_size < 0 || block_size > kMaxBlockSize) {
    return wrong(absl::StrCat("\"block_size\" must be from 0 to ", kMaxBlockSize));
  }
  stored.block_size = static_cast<int>(block_size);
  stored.medium = fields.text("medium", 6);
  stored.ownership = fields.text("ownership", 0);
  if (absl::Status status = read_plain(fields, &stored); !status.ok()) return status;
  auto group = fields.group();
  if (!group.ok()) return group.status();
  stored.group = *group;
  stored.group_kind = fields.text("kv_cache_spec_kind", 0);
  stored.remote = fields.remote();
  return stored;
}

absl::StatusOr<BlockRemoved> read_removed(const Fields& fields) {
  BlockRemoved removed;
  auto hashes = fields.hashes();
  if (!hashes.ok()) return hashes.status();
  removed.hashes = *std::move(hashes);
  removed.medium = fields.text("medium", 2);
  removed.ownership = fields.text("ownership", 0);
  auto group = fields.group();
  if (!group.ok()) return group.status();
  removed.group = *group;
  removed.remote = fields.remote();
  return removed;
}

absl::Status read_event(const json& event, std::vector<KvEvent>* events) {
  const bool named = event.is_object();
  if (!named && (!event.is_array() || event.empty())) return wrong("an event must be a map");
  const json& type = named ? member(event, "type") : event[0];
  if (!type.is_string()) return wrong("an event has no \"type\"");
  const auto& name = type.get_ref<const std::string&>();
  const Fields fields(event);
  if (name == "BlockStored") {
    absl::StatusOr<BlockStored> stored = read_stored(fields);
    if (!stored.ok()) return stored.status();
    events->emplace_back(*std::move(stored));
  } else if (name == "BlockRemoved") {
    absl::StatusOr<BlockRemoved> removed = read_removed(fields);
    if (!removed.ok()) return removed.status();
    events->emplace_back(*std::move(removed));
  } else if (name == "AllBlocksCleared") {
    events->emplace_back(AllBlocksCleared());
  } else {
    return wrong(absl::StrCat("\"", name.substr(0, 64), "\" is not a known event"));
  }
  return absl::OkStatus();
}

json binary(const SentHash& hash) {
  return json::binary(std::vector<uint8_t>(hash.begin(), hash.end()));
}

json hash_list(const std::vector<SentHash>& hashes) {
  json list = json::array();
  for (const SentHash& hash : hashes) list.push_back(binary(hash));
  return list;
}

json text_or_null(const std::string& text) { return text.empty() ? json() : json(text); }

json written(const BlockStored& stored) {
  json event = {{"type", "BlockStored"},
                {"block_hashes", hash_list(stored.hashes)},
                {"parent_block_hash", stored.parent.has_value() ? binary(*stored.parent) : json()},
                {"token_ids", stored.tokens},
                {"block_size", stored.block_size},
                {"lora_id", nullptr},
                {"medium", text_or_null(stored.medium)},
                {"lora_name", nullptr}};
  if (!stored.plain.empty()) {
    json keys = json::array();
    for (const bool plain : stored.plain) {
      keys.push_back(plain ? json() : json::array({"?"}));
    }
    event["extra_keys"] = std::move(keys);
  }
  if (stored.group.has_value()) event["group_idx"] = *stored.group;
  if (!stored.group_kind.empty()) event["kv_cache_spec_kind"] = stored.group_kind;
  if (!stored.ownership.empty()) event["ownership"] = stored.ownership;
  if (stored.remote) event["locality"] = "REMOTE";
  return event;
}

json written(const BlockRemoved& removed) {
  json event = {{"type", "BlockRemoved"},
                {"block_hashes", hash_list(removed.hashes)},
                {"medium", text_or_null(removed.medium)}};
  if (removed.group.has_value()) event["group_idx"] = *removed.group;
  if (!removed.ownership.empty()) event["ownership"] = removed.ownership;
  if (removed.remote) event["locality"] = "REMOTE";
  return event;
}

json written(const AllBlocksCleared&) { return {{"type", "AllBlocksCleared"}}; }

}  // namespace

std::string encode_batch(const EventBatch& batch) {
  json events = json::array();
  for (const KvEvent& event : batch.events) {
    events.push_back(std::visit([](const auto& each) { return written(each); }, event));
  }
  json whole = json::array({batch.time, std::move(events)});
  if (batch.rank.has_value()) whole.push_back(*batch.rank);
  std::string payload;
  json::to_msgpack(whole, nlohmann::detail::output_adapter<char>(payload));
  return payload;
}

absl::StatusOr<EventBatch> parse_batch(std::string_view payload) {
  const auto parsed = [&]() -> json {
    DepthCheck depth;
    if (!json::sax_parse(payload.begin(), payload.end(), &depth, json::input_format_t::msgpack)) {
      return json(json::value_t::discarded);
    }
    return json::from_msgpack(payload.begin(), payload.end(), true, false);
  };
  const json whole = parsed();
  if (whole.is_discarded()) {
    return wrong(absl::StrCat("its ", payload.size(), " bytes are not the msgpack of a batch"));
  }
  if (!whole.is_array() || whole.size() < 2 || !whole[0].is_number() || !whole[1].is_array()) {
    return wrong("it must be [time, [event, ...], rank]");
  }
  EventBatch batch;
  batch.time = whole[0].get<double>();
  if (whole.size() > 2 && !whole[2].is_null()) {
    if (!whole[2].is_number_integer()) return wrong("the rank must be a whole number or nil");
    batch.rank = whole[2].get<int64_t>();
  }
  batch.events.reserve(whole[1].size());
  for (const json& event : whole[1]) {
    if (absl::Status status = read_event(event, &batch.events); !status.ok()) return status;
  }
  return batch;
}

std::string sequence_frame(uint64_t sequence) { return big_endian(sequence); }

std::optional<uint64_t> parse_sequence(std::string_view frame) {
  if (frame.size() != sizeof(uint64_t)) return std::nullopt;
  uint64_t sequence = 0;
  for (const char byte : frame) sequence = sequence << 8 | static_cast<uint8_t>(byte);
  return sequence;
}

namespace {

SentHash sent(const serve::BlockHash& hash) {
  return {reinterpret_cast<const char*>(&hash), sizeof(hash)};
}

}  // namespace

EventBatch batch_of(std::span<const serve::CacheEvent> events) {
  EventBatch batch;
  for (const serve::CacheEvent& event : events) {
    KvEvent* last = batch.events.empty() ? nullptr : &batch.events.back();
    if (!event.stored) {
      if (last == nullptr || !std::holds_alternative<BlockRemoved>(*last)) {
        last = &batch.events.emplace_back(
            BlockRemoved{.medium = std::string(kEngineMedium), .group = 0});
      }
      std::get<BlockRemoved>(*last).hashes.push_back(sent(event.hash));
      continue;
    }
    auto* stored = last == nullptr ? nullptr : std::get_if<BlockStored>(last);
    const auto parent =
        event.parent.has_value() ? std::optional(sent(*event.parent)) : std::nullopt;
    if (stored == nullptr || !parent.has_value() || stored->hashes.back() != *parent) {
      stored = &std::get<BlockStored>(
          batch.events.emplace_back(BlockStored{.parent = parent,
                                                .block_size = kBlockTokens,
                                                .medium = std::string(kEngineMedium),
                                                .group = 0,
                                                .group_kind = "full_attention"}));
    }
    stored->hashes.push_back(sent(event.hash));
    stored->tokens.insert(stored->tokens.end(), event.tokens.begin(), event.tokens.end());
  }
  return batch;
}

}  // namespace baton::engine::kv_events
