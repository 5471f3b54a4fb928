// An engine's event that may outlive the call in which it came.
#pragma once

#include <string>

#include "engine/serve/liveness.h"
#include "engine/serve/requests/request.h"

namespace baton::engine::http {

struct StreamedEvent {
  serve::OutputEvent event;
  serve::RequestMetrics metrics;           // of the last event, which points here
  std::vector<serve::TokenChoice> prompt;  // of the first one, which points here

  static StreamedEvent copy(const serve::OutputEvent& source) {
    StreamedEvent copied{source, {}, {}};
    if (source.metrics != nullptr) copied.metrics = *source.metrics;
    copied.event.metrics = nullptr;
    if (source.prompt != nullptr) copied.prompt = *source.prompt;
    copied.event.prompt = nullptr;
    // A status of its own: copies share their message, and the engine's thread goes on with its.
    copied.event.status = absl::Status(source.status.code(), std::string(source.status.message()));
    if (source.status.GetPayload(serve::kStoppedPayload).has_value()) {
      copied.event.status.SetPayload(serve::kStoppedPayload, absl::Cord());
    }
    return copied;
  }
  const serve::OutputEvent& view() {
    event.metrics = event.finished ? &metrics : nullptr;
    event.prompt = prompt.empty() ? nullptr : &prompt;
    return event;
  }
};

}  // namespace baton::engine::http
