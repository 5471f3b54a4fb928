// A worker that takes requests and answers no more of them than the test says, and a router over
// such.
#pragma once

#include "engine/http/http_listener.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/std.h"

namespace baton::engine::serve {

using Exchange = std::shared_ptr<http::HttpExchange>;

// Says that it is well, and of what it is asked only as much as the test says.
class StuckWorker {
 public:
  explicit StuckWorker(std::string says = "") : says_(std::move(says)) {
    listener_.route("GET", "/health", [this](const Exchange& exchange) {
      json page = json::object();
      const std::lock_guard lock(mutex_);
      if (deaf_) return unheard_.push_back(exchange);
      if (!model_.empty()) page["model"] = model_;
      if (draining) page["draining"] = true;
      exchange->reply(draining ? 503 : 200, "application/json", page.dump());
    });
    const auto take = [this](const Exchange& exchange) {
      exchange->on_gone([this] { ++left; });
      const std::lock_guard lock(mutex_);
      ++asked;  // before its client has anything of it
      bodies_.push_back(json::parse(exchange->request().body, nullptr, false));
      waits_for_ = exchange->request().header("x-baton-waits-for");
      if (!says_.empty()) {
        exchange->begin(200, "text/event-stream");
        exchange->write(says_);
      }
      exchanges_.push_back(exchange);
    };
    for (const char* path : {"/v1/models", "/version"}) listener_.route("GET", path, take);
    for (const char* path : {"/v1/completions", "/tokenize"}) listener_.route("POST", path, take);
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~StuckWorker() { listener_.stop(); }
  int port() const { return listener_.port(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", port()); }
  // It goes on with what it was asked last.
  void say(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    exchanges_.back()->begin(200, "text/event-stream");
    exchanges_.back()->write(bytes);
    exchanges_.back()->end();
    exchanges_.pop_back();
  }
  // Requests that are not answered.
  size_t waiting() {
    const std::lock_guard lock(mutex_);
    return exchanges_.size();
  }
  // Whether whoever asked has hung up. In a stream that is noticed by what is sent.
  bool was_left() {
    const std::lock_guard lock(mutex_);
    if (exchanges_.empty()) return false;
    if (exchanges_.back()->begun()) exchanges_.back()->write(": I am still here\n\n");
    return left > 0;
  }
  // It does not say how it is any more: it is stopped. Or it goes on, and says so late.
  void set_deaf(bool deaf) {
    const std::lock_guard lock(mutex_);
    deaf_ = deaf;
    for (const Exchange& exchange : std::exchange(unheard_, {})) {
      exchange->reply(200, "application/json", "{}");
    }
  }
  // The fingerprint that it says it has, from the next look on.
  void set_model(const std::string& fingerprint) {
    const std::lock_guard lock(mutex_);
    model_ = fingerprint;
  }
  // What it was told of where the KV is, last.
  std::string prefill() { return bodies().back()["kv_transfer_params"]["prefill"]; }
  std::vector<json> bodies() {
    const std::lock_guard lock(mutex_);
    return bodies_;
  }
  // What its client is said to wait for, last.
  std::string waits_for() {
    const std::lock_guard lock(mutex_);
    return waits_for_;
  }

  std::atomic<bool> draining{false};  // it says that it is about to end
  std::atomic<int> asked{0};
  std::atomic<int> left{0};  // whoever asked has hung up

 private:
  http::HttpListener listener_;
  std::mutex mutex_;
  const std::string says_;
  std::string model_, waits_for_;
  bool deaf_ = false;
  std::vector<Exchange> exchanges_, unheard_;
  std::vector<json> bodies_;
};

// No worker is probed between two tests' events.
inline router::RouterOptions options_for(std::vector<std::string> decode) {
  router::RouterOptions options{.port = 0, .decode = std::move(decode)};
  options.health_interval = std::chrono::hours(1);
  options.comeback = std::chrono::milliseconds(0);
  return options;
}

inline json stream_request() {
  json body = request_body();
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return body;
}

// A worker's answer to it, byte by byte.
inline const std::string& whole_answer() {
  static const std::string* answer = [] {
    Worker worker;
    return new std::string(post(worker.port(), stream_request())->body);
  }();
  return *answer;
}

// What a router says of itself.
inline json health(int port) { return json::parse(client_of(port).Get("/health")->body); }

// The events of a whole answer, each with its end.
inline std::vector<std::string> events_of(int port) {
  const std::string bytes = post(port, stream_request())->body;
  std::vector<std::string> events;
  for (size_t at = 0, end; (end = bytes.find("\n\n", at)) != std::string::npos; at = end + 2) {
    events.push_back(bytes.substr(at, end + 2 - at));
  }
  return events;
}

inline std::string first(const std::vector<std::string>& events, size_t count) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += events[i];
  return bytes;
}
inline std::string behind(const std::vector<std::string>& events, size_t count) {
  return first(events, events.size()).substr(first(events, count).size());
}

}  // namespace baton::engine::serve
