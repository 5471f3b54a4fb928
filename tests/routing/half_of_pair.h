// A worker of any make that hands KV over or takes it, and answers what the test says.
#pragma once

#include "engine/http/http_listener.h"
#include "tests/engine_serve/http_fixture.h"
#include "tests/routing/stuck_worker.h"

namespace baton::engine::serve {

// What the router may know of it, and what it is asked.
class Half {
 public:
  // kVllm says nothing but 200 of its health. The others are `baton serve`, with or without an
  // agent for hand-offs; kOursAndPrefill has a connector as well.
  enum Make : uint8_t { kVllm, kOurs, kOursWithAgent, kOursAndPrefill };

  explicit Half(Make make, std::string agent = "agent") {
    json page = {{"status", "ok"}, {"quiet_s", 0}};
    if (make == kOursWithAgent) page["kv_agent"] = {{"name", agent}, {"address", "127.0.0.1:7"}};
    listener_.route("GET", "/health", [=](const Exchange& exchange) {
      exchange->reply(200, "application/json", make == kVllm ? "" : page.dump());
    });
    if (make == kVllm) {
      listener_.route("GET", "/v1/models", [](const Exchange& exchange) {
        exchange->reply(200, "application/json", R"({"data": [{"id": "served"}]})");
      });
    } else {
      page["address"] = make == kOursAndPrefill ? "P" : "";
      listener_.route("GET", "/v1/baton/address", [=](const Exchange& exchange) {
        exchange->reply(200, "application/json", page.dump());
      });
    }
    for (const char* path : {"/v1/completions", "/v1/chat/completions"}) {
      listener_.route("POST", path, [this](const Exchange& exchange) { take(exchange); });
    }
    EXPECT_TRUE(listener_.listen("127.0.0.1", 0).ok());
  }
  ~Half() { listener_.stop(); }
  std::string url() const { return absl::StrCat("http://127.0.0.1:", listener_.port()); }

  // How it answers from now on; without it waits until it is told.
  void answer(int status, const std::string& body) {
    const std::lock_guard lock(mutex_);
    status_ = status;
    body_ = body;
    for (const Exchange& exchange : open_) reply(exchange);
    open_.clear();
  }
  // ... where it is told to fetch KV, if not in the same way.
  void answer_behind_prefill(int status, const std::string& body) {
    const std::lock_guard lock(mutex_);
    behind_prefill_ = {status, body};
  }
  // It begins with its answer from now on, until it is told to answer().
  void begin(const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    begins_with_ = bytes;
  }
  size_t asked() const {
    const std::lock_guard lock(mutex_);
    return questions_.size();
  }
  json question(size_t number) const {
    const std::lock_guard lock(mutex_);
    return questions_.at(number);
  }
  json params(size_t number) const { return question(number)["kv_transfer_params"]; }
  std::atomic<int> left{0};  // whoever asked has hung up

 private:
  void take(const Exchange& exchange) {
    exchange->on_gone([this] { ++left; });
    const std::lock_guard lock(mutex_);
    questions_.push_back(json::parse(exchange->request().body));
    const json& params = questions_.back()["kv_transfer_params"];
    if (behind_prefill_.has_value() && params.contains("do_remote_prefill") &&
        params["do_remote_prefill"] == true) {
      return reply(exchange, behind_prefill_->first, behind_prefill_->second);
    }
    if (status_ == 0) {
      if (!begins_with_.empty()) {
        exchange->begin(200, "text/event-stream");
        exchange->write(begins_with_);
      }
      open_.push_back(exchange);
    } else {
      reply(exchange);
    }
  }
  void reply(const Exchange& exchange) const { reply(exchange, status_, body_); }
  static void reply(const Exchange& exchange, int status, const std::string& body) {
    if (exchange->begun()) {
      exchange->write(body);
      return exchange->end();
    }
    exchange->reply(status, body.starts_with("data:") ? "text/event-stream" : "application/json",
                    body);
  }

  http::HttpListener listener_;
  mutable std::mutex mutex_;
  int status_ = 0;
  std::string body_;
  std::string begins_with_;
  std::optional<std::pair<int, std::string>> behind_prefill_;
  std::vector<json> questions_;
  std::vector<Exchange> open_;
};

}  // namespace baton::engine::serve
