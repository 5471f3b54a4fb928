// One client's request at the router: each of its choices goes to a worker, and to another one when
// that fails. Internal to engine/router; everything runs on the loop's thread.
//
// What a worker was asked that dies or no longer answers its probes goes to another one, however
// much that is. Where no decode worker is left, requests wait for one to come back, for a while.
//
// A pair of which a half is of another make is driven by vLLM's kv_transfer_params: the prompt is
// asked of prefill, and decode, asked when that has answered, or at once where prefill's agent is
// known, fetches its KV. Where prefill says no, breaks off or goes down, decode computes.
//
// Where the prompt is long, choices are asked a few at a time: the next when a worker has begun to
// answer one, so that a request with many choices costs workers not many times its size at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/http/http_fetch.h"
#include "engine/http/http_listener.h"
#include "engine/http/openai/openai_request.h"
#include "engine/router/prefill_ask.h"
#include "engine/router/stream_relay.h"
#include "engine/router/worker_body.h"
#include "engine/router/workers.h"
#include "transport/clock.h"

namespace baton::engine::router {

// Made by start(); lives until it is answered or its client is gone.
class RelayedRequest : public std::enable_shared_from_this<RelayedRequest> {
 public:
  // `body`: what workers are posted. `keys`: one for each prompt.
  static void start(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                    std::shared_ptr<const WorkerBody> body,
                    std::shared_ptr<const http::ApiRequest> request,
                    const std::vector<std::shared_ptr<const PromptKey>>& keys,
                    std::string request_id);

  RelayedRequest(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                 std::shared_ptr<const WorkerBody> body,
                 std::shared_ptr<const http::ApiRequest> request, std::string request_id);

  // The router ends: its client gets an error.
  void end_early();
  // A decode worker answers no more: what it was asked goes to another one.
  void leave_worker(size_t worker);
  // A prefill worker does: decode computes what it was asked.
  void leave_prefill(size_t worker);

 private:
  // A worker that is asked.
  struct Attempt {
    Place prefill, decode;
    std::unique_ptr<PrefillAsk> ask;         // by kv_transfer_params
    std::unique_ptr<http::HttpFetch> fetch;  // of decode; null: prefill is waited for
    int status = 0;
    std::string retry_after;
    std::string error_body;
    bool answered = false;
  };
  struct Leg {
    std::unique_ptr<StreamRelay> relay;
    std::shared_ptr<const PromptKey> key;
    std::vector<size_t> failed;
    int retries = 0;
    size_t tokens_before = 0;
    bool computed_alone = false;       // what prefill handed over did not do
    std::string model;                 // that has written what is here: no other goes on with it
    std::unique_ptr<Attempt> attempt;  // whose stream is relayed
    std::unique_ptr<http::EventLoop::Timer> look;  // for a worker, where none is up
    bool done = false;
  };

  // Asks for choices that no worker was asked for yet, as many as may be.
  void ask_more();
  void attempt(Leg& leg);
  void start_over(Leg& leg);
  // Picks among prefill workers that can hand over to its decode worker; how the picked one does.
  Way pick_prefill(const Leg& leg, Attempt& attempt);
  bool may_use_params(const Leg& leg) const;
  std::string address_of(const Attempt& attempt) const;
  http::HttpHeaders headers() const;
  void ask_prefill(Leg& leg, Attempt& attempt);
  void prefill_answered(Leg& leg, Attempt& attempt, const absl::StatusOr<std::string>& params);
  void compute_alone(Leg& leg, Attempt& attempt);
  void post(Leg& leg, Attempt& attempt, std::vector<http::SharedBytes> body);
  void received(Leg& leg, Attempt& attempt, std::string_view bytes);
  void note_news(Leg& leg);
  void ended(Leg& leg, Attempt& attempt, const absl::Status& connection);
  absl::Status outcome(const Leg& leg, const Attempt& attempt, const absl::Status& connection);
  void retry(Leg& leg, const absl::Status& why);
  // Continues a choice whose worker is lost, once a decode worker is up again.
  void await_worker(Leg& leg, const absl::Status& why);
  // Its worker says that its engine has stopped: no request asks it before it answers a probe.
  void note_stopped(const Attempt& attempt, const absl::Status& error);
  // With the HTTP status of what was tried last.
  void give_up(const std::string& text, const absl::Status& last);
  bool send(std::string_view bytes);
  void finish_if_done();
  void fail(const absl::Status& status);
  void close();

  Workers& workers_;
  const std::shared_ptr<http::HttpExchange> exchange_;
  const std::shared_ptr<const WorkerBody> body_;
  const std::shared_ptr<const http::ApiRequest> request_;
  const std::string request_id_;
  std::vector<Leg> legs_;
  size_t asked_ = 0;  // legs, the first ones
  StreamRelay::Head head_ = std::make_shared<nlohmann::json>();
  std::shared_ptr<RelayedRequest> self_;  // until close()
};

}  // namespace baton::engine::router
