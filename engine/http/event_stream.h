// A queue of one request's events, from the engine's thread to the thread that serves its client.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "engine/serve/request.h"

namespace baton::engine::http {

// An event that may outlive the engine's call.
struct StreamedEvent {
  serve::OutputEvent event;
  serve::RequestMetrics metrics;  // of the last event, which points here

  static StreamedEvent copy(const serve::OutputEvent& source) {
    StreamedEvent copied{source, {}};
    if (source.metrics != nullptr) copied.metrics = *source.metrics;
    copied.event.metrics = nullptr;
    // A status of its own: copies share their message, and the engine's thread goes on with its.
    copied.event.status = absl::Status(source.status.code(), std::string(source.status.message()));
    return copied;
  }
  const serve::OutputEvent& view() {
    event.metrics = event.finished ? &metrics : nullptr;
    return event;
  }
};

// Thread-safe.
class EventStream {
 public:
  void push(const serve::OutputEvent& event) {
    {
      const std::lock_guard lock(mutex_);
      events_.push_back(StreamedEvent::copy(event));
    }
    arrived_.notify_one();
  }

  // The next event, or nothing after `timeout`.
  std::optional<StreamedEvent> pop(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!arrived_.wait_for(lock, timeout, [this] { return !events_.empty(); })) return std::nullopt;
    StreamedEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<StreamedEvent> events_;
};

}  // namespace baton::engine::http
