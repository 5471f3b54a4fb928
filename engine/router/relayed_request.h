// One client's request at the router: each of its choices goes to a worker, and to another one when
// that fails. Internal to engine/router; everything runs on the loop's thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/http/http_fetch.h"
#include "engine/http/http_listener.h"
#include "engine/http/openai/openai_request.h"
#include "engine/router/retry_budget.h"
#include "engine/router/stream_relay.h"
#include "engine/router/worker_picker.h"

namespace baton::engine::router {

// Holds a place with a worker for as long as it lives.
class Place {
 public:
  Place() = default;
  Place(WorkerPicker& picker, std::optional<size_t> worker) : picker_(&picker), worker_(worker) {}
  ~Place() { release(); }
  Place(Place&& other) noexcept { *this = std::move(other); }
  Place& operator=(Place&& other) noexcept {
    release();
    picker_ = other.picker_;
    worker_ = std::exchange(other.worker_, std::nullopt);
    return *this;
  }
  bool has_value() const { return worker_.has_value(); }
  size_t operator*() const { return *worker_; }
  void release() {
    if (worker_.has_value()) picker_->release(*worker_);
    worker_.reset();
  }

 private:
  WorkerPicker* picker_ = nullptr;
  std::optional<size_t> worker_;
};

class RelayedRequest;

// The workers as the router knows them.
struct Workers {
  Workers(std::vector<http::HttpUrl> prefill_urls, std::vector<http::HttpUrl> decode_urls)
      : prefill(std::move(prefill_urls)),
        decode(std::move(decode_urls)),
        prefills(prefill.size()),
        decodes(decode.size()),
        addresses(prefill.size()) {}

  const std::vector<http::HttpUrl> prefill, decode;
  WorkerPicker prefills, decodes;
  std::vector<std::string> addresses;  // of the prefill workers' connectors; "" while unknown
  RetryBudget retries;
  int max_retries = 3;  // in a row without a new token
  uint64_t retried = 0;
  std::string api_key;
  std::shared_ptr<http::EventLoop> loop;
  std::set<RelayedRequest*> open;
};

// Made by start(); lives until it is answered or its client is gone.
class RelayedRequest : public std::enable_shared_from_this<RelayedRequest> {
 public:
  static void start(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                    const nlohmann::json& body, std::shared_ptr<const http::ApiRequest> request,
                    std::string request_id);

  RelayedRequest(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                 std::shared_ptr<const http::ApiRequest> request, std::string request_id);

  // A decode worker answers no more: what it was asked goes to another one.
  void leave_worker(size_t worker);

 private:
  struct Leg {
    std::unique_ptr<StreamRelay> relay;
    std::vector<serve::BlockHash> chain;
    std::vector<size_t> failed;
    int retries = 0;
    size_t tokens_before = 0;
    Place prefill, decode;
    std::unique_ptr<http::HttpFetch> fetch;
    int status = 0;
    std::string retry_after;
    std::string error_body;
    bool done = false;
  };

  void attempt(Leg& leg);
  void received(Leg& leg, std::string_view bytes);
  void ended(Leg& leg, const absl::Status& connection);
  absl::Status outcome(Leg& leg, const absl::Status& connection);
  void retry(Leg& leg, const absl::Status& why);
  bool send(std::string_view bytes);
  void finish_if_done();
  void fail(const absl::Status& status);
  void close();

  Workers& workers_;
  const std::shared_ptr<http::HttpExchange> exchange_;
  const std::shared_ptr<const http::ApiRequest> request_;
  const std::string request_id_;
  std::vector<Leg> legs_;
  StreamRelay::Head head_ = std::make_shared<nlohmann::json>();
  std::shared_ptr<RelayedRequest> self_;  // until close()
};

}  // namespace baton::engine::router
