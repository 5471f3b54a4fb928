// A worker of any make that answers what the test says, and a router over such.
#pragma once

#include "engine/http/http_listener.h"
#include "engine/router/router.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/std.h"

namespace baton::engine::serve {

using Exchange = std::shared_ptr<http::HttpExchange>;

// What the router may know of a worker. kVllm says nothing but 200 of its health. The others are
// `baton serve`, with or without an agent for hand-offs; kOursAndPrefill has a connector as well.
enum Make : uint8_t { kVllm, kOurs, kOursWithAgent, kOursAndPrefill };

// Says that it is well. Requests wait for what the test says.
class FakeWorker {
 public:
  explicit FakeWorker(Make make) {
    json page = {{"status", "ok"}, {"quiet_s", 0}};
    if (make == kOursWithAgent) page["kv_agent"] = {{"name", "agent"}, {"address", "127.0.0.1:7"}};
    listener_.route("GET", "/health", [this, make, page](const Exchange& exchange) {
      const std::lock_guard lock(mutex_);
      if (deaf_) return unheard_.push_back(exchange);
      json now = page;
      if (!model_.empty()) now["model"] = model_;
      if (draining) now["draining"] = true;
      exchange->reply(draining ? 503 : 200, "application/json", make == kVllm ? "" : now.dump());
    });
    const auto hold = [this](const Exchange& exchange) { take(exchange); };
    if (make == kVllm) {
      listener_.route("GET", "/v1/models", [](const Exchange& exchange) {
        exchange->reply(200, "application/json", R"({"data": [{"id": "served"}]})");
      });
    } else {
      listener_.route("GET", "/v1/models", hold);
      page["address"] = make == kOursAndPrefill ? "P" : "";
      listener_.route("GET", "/v1/baton/address", [page](const Exchange& exchange) {
        exchange->reply(200, "application/json", page.dump());
      });
    }
    listener_.route("GET", "/version", hold);
    for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize"}) {
      listener_.route("POST", path, hold);
    }
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  explicit FakeWorker(const std::string& begins_with = "") : FakeWorker(kOurs) {
    begin(begins_with);
  }
  ~FakeWorker() { listener_.stop(); }
  int port() const { return listener_.port(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", port()); }

  // It begins with its answers from now on, until it is told more.
  void begin(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    begins_with_ = bytes;
  }
  // It goes on with what it was asked last, to the end.
  void say(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    reply(exchanges_.back(), {200, "data:"}, bytes);
    exchanges_.pop_back();
  }
  // How it answers everything, from what waits on; status 0: as it did at first.
  void answer(int status, const std::string& body) {
    const std::lock_guard lock(mutex_);
    answer_.reset();
    if (status != 0) answer_ = {status, body};
    for (const Exchange& exchange : std::exchange(exchanges_, {})) {
      reply(exchange, {status, body}, body);
    }
  }
  // ... where it is told to fetch KV, if not in the same way.
  void answer_behind_prefill(int status, const std::string& body) {
    const std::lock_guard lock(mutex_);
    behind_prefill_ = {status, body};
  }

  size_t asked() const { return asked_; }
  // Requests that are not answered.
  size_t waiting() const {
    const std::lock_guard lock(mutex_);
    return exchanges_.size();
  }
  std::vector<json> questions() const {
    const std::lock_guard lock(mutex_);
    return questions_;
  }
  json question(size_t number) const { return questions().at(number); }
  json params(size_t number) const { return question(number)["kv_transfer_params"]; }
  // What it was told of where the KV is, last.
  std::string prefill() const { return questions().back()["kv_transfer_params"]["prefill"]; }
  // What its client is said to wait for, last.
  std::string waits_for() const {
    const std::lock_guard lock(mutex_);
    return waits_for_;
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

  std::atomic<bool> draining{false};  // it says that it is about to end
  std::atomic<int> left{0};           // whoever asked has hung up

 private:
  using Answer = std::pair<int, std::string>;

  void take(const Exchange& exchange) {
    exchange->on_gone([this] { ++left; });
    const std::lock_guard lock(mutex_);
    ++asked_;  // before its client has anything of it
    questions_.push_back(json::parse(exchange->request().body, nullptr, false));
    waits_for_ = exchange->request().header("x-baton-waits-for");
    const std::optional<Answer>& answer =
        behind_prefill_.has_value() && fetches(questions_.back()) ? behind_prefill_ : answer_;
    if (answer.has_value()) return reply(exchange, *answer, answer->second);
    if (!begins_with_.empty()) {
      exchange->begin(200, "text/event-stream");
      exchange->write(begins_with_);
    }
    exchanges_.push_back(exchange);
  }
  static bool fetches(const json& question) {
    return question.contains("kv_transfer_params") &&
           question["kv_transfer_params"].value("do_remote_prefill", false);
  }
  // A stream where `kind` is one, or where it has begun as one.
  static void reply(const Exchange& exchange, const Answer& kind, const std::string& body) {
    const bool stream = kind.second.starts_with("data:");
    if (kind.first == 200 && stream) exchange->begin(200, "text/event-stream");
    if (!exchange->begun()) return exchange->reply(kind.first, "application/json", body);
    exchange->write(body);
    exchange->end();
  }

  http::HttpListener listener_;
  mutable std::mutex mutex_;
  std::string begins_with_, model_, waits_for_;
  std::optional<Answer> answer_, behind_prefill_;
  bool deaf_ = false;
  std::atomic<size_t> asked_{0};
  std::vector<json> questions_;
  std::vector<Exchange> exchanges_, unheard_;
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
