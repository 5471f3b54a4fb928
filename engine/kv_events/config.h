// Where KV events are published, and where they are heard.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::engine::kv_events {

// vLLM's --kv-events-config, with its keys and defaults:
//
//   {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
//    "replay_endpoint": "tcp://*:5558", "topic": "kv-events", "buffer_steps": 10000,
//    "hwm": 100000, "max_queue_size": 100000}
struct PublisherConfig {
  bool enabled = false;  // enable_kv_cache_events, and the publisher is not "null"
  // Bound where it has a '*' or "::", or is ipc://; else it is connected to, as vLLM does.
  std::string endpoint = "tcp://*:5557";
  std::string replay_endpoint;      // "": there are no replays; always bound
  size_t buffer_steps = 10'000;     // batches that can be replayed
  size_t hwm = 100'000;             // batches that wait for one slow subscriber, at most
  size_t max_queue_size = 100'000;  // that wait to be sent at all
  std::string topic;

  bool binds() const;
};

// InvalidArgument: no JSON object, a key that vLLM does not have, with the nearest that it has, or
// a value that cannot be.
absl::StatusOr<PublisherConfig> parse_publisher_config(std::string_view text);

// A publisher that is listened to: "kv_events=tcp://HOST:5557", "replay=tcp://HOST:5558" and
// "topic=TEXT", the first of which there must be.
struct EventSource {
  std::string endpoint;
  std::string replay_endpoint;  // "": it gives none
  std::string topic;            // all topics that begin so
  friend bool operator==(const EventSource&, const EventSource&) = default;
};

// Takes one such word. InvalidArgument: another key, or no endpoint that one can connect to.
absl::Status read_source_word(std::string_view word, std::optional<EventSource>* source);

// OK where this build has ZeroMQ; else Unimplemented says what to install.
absl::Status can_publish();

}  // namespace baton::engine::kv_events
