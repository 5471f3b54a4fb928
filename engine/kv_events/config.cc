// Reads the settings of KV events, and what an endpoint may be.
#include "engine/kv_events/config.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/files/json_fields.h"
#include "engine/files/utf8.h"

namespace baton::engine::kv_events {
namespace {

using nlohmann::json;

constexpr int64_t kMost = int64_t{1} << 30;

const std::vector<std::string>& keys() {
  static const std::vector<std::string> kKeys = {
      "enable_kv_cache_events", "publisher", "endpoint",       "replay_endpoint",
      "buffer_steps",           "hwm",       "max_queue_size", "topic"};
  return kKeys;
}

// "tcp://HOST:PORT" or "ipc://PATH"; where it may be bound also any port, or every address.
absl::Status check_endpoint(std::string_view name, const std::string& endpoint, bool may_bind) {
  const std::string_view text = endpoint;
  if (text.starts_with("ipc://") && text.size() > 6) return absl::OkStatus();
  if (text.starts_with("tcp://")) {
    const std::string_view address = text.substr(6);
    const size_t colon = address.rfind(':');
    int port = -1;
    if (colon != std::string_view::npos && colon > 0 &&
        absl::SimpleAtoi(view(address.substr(colon + 1)), &port) && port >= (may_bind ? 0 : 1) &&
        port <= 65535 && (may_bind || address.find('*') == std::string_view::npos)) {
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      view(name), " is \"", endpoint, "\": it must be ",
      may_bind ? "tcp://*:PORT, tcp://HOST:PORT" : "tcp://HOST:PORT", " or ipc://PATH"));
}

absl::Status read_size(const json& object, const char* key, size_t* value) {
  const auto read = int_field(object, key, 1, kMost, static_cast<int64_t>(*value));
  if (!read.ok()) return read.status();
  *value = static_cast<size_t>(*read);
  return absl::OkStatus();
}

}  // namespace

bool PublisherConfig::binds() const {
  return endpoint.find('*') != std::string::npos || endpoint.find("::") != std::string::npos ||
         endpoint.starts_with("ipc://");
}

absl::StatusOr<PublisherConfig> parse_publisher_config(std::string_view text) {
  const absl::StatusOr<json> object = parse_json(text, "the configuration of KV events");
  if (!object.ok()) return object.status();
  if (!object->is_object()) {
    return absl::InvalidArgumentError(
        "the configuration of KV events must be a JSON object, such as "
        "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}");
  }
  for (const auto& item : object->items()) {
    if (std::find(keys().begin(), keys().end(), item.key()) != keys().end()) continue;
    return absl::InvalidArgumentError(absl::StrCat("\"", item.key().substr(0, 64),
                                                   "\" is not one of its keys, which are ",
                                                   absl::StrJoin(keys(), ", ")));
  }
  PublisherConfig config;
  const auto enabled = bool_field(*object, "enable_kv_cache_events", false);
  if (!enabled.ok()) return enabled.status();
  const auto publisher = string_field(*object, "publisher", *enabled ? "zmq" : "null");
  if (!publisher.ok()) return publisher.status();
  if (*publisher != "zmq" && *publisher != "null") {
    return absl::InvalidArgumentError(absl::StrCat("\"publisher\" is \"", publisher->substr(0, 64),
                                                   "\": it must be zmq or null"));
  }
  config.enabled = *enabled && *publisher == "zmq";
  const auto endpoint = string_field(*object, "endpoint", config.endpoint);
  if (!endpoint.ok()) return endpoint.status();
  config.endpoint = *endpoint;
  if (absl::Status status = check_endpoint("\"endpoint\"", *endpoint, true); !status.ok()) {
    return status;
  }
  const auto replay = string_field(*object, "replay_endpoint", "");
  if (!replay.ok()) return replay.status();
  config.replay_endpoint = *replay;
  if (!replay->empty()) {
    if (absl::Status status = check_endpoint("\"replay_endpoint\"", *replay, true); !status.ok()) {
      return status;
    }
  }
  const auto topic = string_field(*object, "topic", "");
  if (!topic.ok()) return topic.status();
  config.topic = *topic;
  if (absl::Status status = read_size(*object, "buffer_steps", &config.buffer_steps);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = read_size(*object, "hwm", &config.hwm); !status.ok()) return status;
  if (absl::Status status = read_size(*object, "max_queue_size", &config.max_queue_size);
      !status.ok()) {
    return status;
  }
  return config;
}

absl::Status read_source_word(std::string_view word, std::optional<EventSource>* source) {
  const size_t equals = word.find('=');
  const std::string_view key = word.substr(0, equals);
  const std::string value(equals == std::string_view::npos ? "" : word.substr(equals + 1));
  if (key == "kv_events") {
    if (source->has_value()) {
      return absl::InvalidArgumentError("kv_events= is given twice, or after replay= or topic=");
    }
    *source = EventSource{.endpoint = value, .replay_endpoint = "", .topic = ""};
    return check_endpoint("kv_events=", value, false);
  }
  if (key != "replay" && key != "topic") {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", view(word.substr(0, 128)), "\" is not one of kv_events=, replay= and topic="));
  }
  if (!source->has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(view(key), "= belongs to kv_events=tcp://HOST:PORT and must come after it"));
  }
  if (key == "topic") {
    (*source)->topic = value;
    return absl::OkStatus();
  }
  (*source)->replay_endpoint = value;
  return check_endpoint("replay=", value, false);
}

}  // namespace baton::engine::kv_events
