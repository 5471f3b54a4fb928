// One choice of a client's stream, joined from the streams of successive workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/router/worker_body.h"

namespace baton::engine::router {

// Exactly-once: an event counts when it has arrived whole, its token is remembered before it is
// passed on, and a worker that takes over is told the tokens seen so far. Since the text that n
// tokens let out depends on them alone, nothing is repeated and nothing lost.
class StreamRelay {
 public:
  // The fields that all choices of a reply share: id, created and model of the first event.
  using Head = std::shared_ptr<nlohmann::json>;

  // `body` is what workers are posted, `request` the client's request, `choice` which of its
  // choices this is. `send` passes an event on to the client and says whether it is still there;
  // without streaming it is not called.
  StreamRelay(std::shared_ptr<const WorkerBody> body,
              std::shared_ptr<const http::ApiRequest> request, size_t choice, Head head,
              std::function<bool(std::string_view)> send);

  // The body for a worker that continues from here; `prefill` may be empty.
  std::vector<http::SharedBytes> next_body(std::string_view prefill) const;
  // ... or to a prefill worker, and to the decode worker behind it, by kv_transfer_params (JSON):
  // before the first token.
  std::vector<http::SharedBytes> body_at_prefill(std::string_view transfer) const {
    return body_->at_prefill(choice_, transfer);
  }
  std::vector<http::SharedBytes> body_behind_prefill(std::string_view transfer) const {
    return body_->behind_prefill(choice_, transfer);
  }
  // The next bytes come from another worker: drops half an event of the last one.
  void begin();
  // Nothing of the answer has come yet, whatever did. Not where the client has seen any of it.
  void start_over();
  // Bytes from the worker. False when the client is gone or the worker has reported an error.
  bool receive(std::string_view bytes);

  bool done() const { return done_; }
  bool client_gone() const { return client_gone_; }
  // The error the worker reported in its stream; OK if there was none.
  const absl::Status& worker_error() const { return worker_error_; }
  size_t tokens_seen() const { return tokens_.size(); }
  // Events that had something of the answer, from all workers.
  size_t news() const { return news_; }
  // True if another worker cannot continue this answer: some of its tokens came without ids.
  bool lacks_ids() const { return lacks_ids_ && !finished_; }
  // The choice as a reply has it that is no stream, and its part of the usage. Call when done().
  nlohmann::json choice() const;
  const nlohmann::json& usage() const { return usage_; }

 private:
  bool handle(std::string_view data);
  bool pass_on(nlohmann::json event);

  const std::shared_ptr<const WorkerBody> body_;
  const std::shared_ptr<const http::ApiRequest> request_;
  const size_t choice_;
  const Head head_;
  const std::function<bool(std::string_view)> send_;
  std::string buffer_;
  size_t searched_ = 0;  // bytes of it in which no event ends
  std::vector<int32_t> tokens_;
  nlohmann::json usage_;
  nlohmann::json logprobs_;
  std::string text_;
  std::string finish_reason_;
  size_t news_ = 0;
  bool lacks_ids_ = false;
  bool begun_ = false;
  bool finished_ = false;  // the choice has its finish_reason
  bool done_ = false;
  bool client_gone_ = false;
  absl::Status worker_error_;
};

// The error for a worker's answer or event with HTTP status `code`, 400 or more. Unavailable:
// another worker may do better; ResourceExhausted: another may have room. Clients get this very
// status. `said` is the error's own code, as api_error() writes it: with serve::kStoppedPayload
// where its engine has stopped.
absl::Status error_of_worker(int code, const std::string& message, std::string_view said);

// The end of a stream whose choices are all done: the usage, if it was asked for, and "[DONE]".
std::string end_of_stream(const http::ApiRequest& request, const StreamRelay::Head& head,
                          const std::vector<const StreamRelay*>& choices);
// The reply to a client that did not ask for a stream.
std::string whole_reply(const http::ApiRequest& request, const StreamRelay::Head& head,
                        const std::vector<const StreamRelay*>& choices);

}  // namespace baton::engine::router
