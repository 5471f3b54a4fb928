// A request's way through the workers.
#include "engine/router/relayed_request.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/http/request_check.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;

constexpr size_t kErrorBytes = 65536;

}  // namespace

RelayedRequest::RelayedRequest(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                               std::shared_ptr<const http::ApiRequest> request,
                               std::string request_id)
    : workers_(workers),
      exchange_(std::move(exchange)),
      request_(std::move(request)),
      request_id_(std::move(request_id)) {}

void RelayedRequest::start(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                           const json& body, std::shared_ptr<const http::ApiRequest> request,
                           const std::vector<std::shared_ptr<const PromptKey>>& keys,
                           std::string request_id) {
  if (exchange->gone()) return;
  const auto relayed = std::make_shared<RelayedRequest>(workers, std::move(exchange),
                                                        std::move(request), std::move(request_id));
  relayed->self_ = relayed;
  workers.open.insert(relayed.get());
  workers.retries.earn();
  relayed->exchange_->on_gone([weak = std::weak_ptr<RelayedRequest>(relayed)] {
    if (const auto gone = weak.lock(); gone != nullptr) gone->close();
  });
  const http::ApiRequest& parsed = *relayed->request_;
  relayed->legs_.resize(parsed.choices());
  for (size_t choice = 0; choice < relayed->legs_.size(); ++choice) {
    Leg& leg = relayed->legs_[choice];
    leg.key = keys[choice / static_cast<size_t>(parsed.best_of)];
    leg.relay = std::make_unique<StreamRelay>(
        body, relayed->request_, choice, relayed->head_,
        [request = relayed.get()](std::string_view bytes) { return request->send(bytes); });
  }
  for (Leg& leg : relayed->legs_) {
    if (relayed->self_ != nullptr) relayed->attempt(leg);
  }
}

bool RelayedRequest::send(std::string_view bytes) {
  if (exchange_->gone()) return false;
  if (!exchange_->begun()) exchange_->begin(200, "text/event-stream");
  exchange_->write(std::string(bytes));
  return true;
}

void RelayedRequest::attempt(Leg& leg) {
  WorkerGroup& prefill = workers_.prefill;
  leg.prefill = Place(prefill.picker, prefill.picker.pick(leg.key));
  leg.decode = Place(workers_.decode.picker, workers_.decode.picker.pick(leg.key, leg.failed));
  if (!leg.decode.has_value()) {
    return fail(absl::UnavailableError("there is no decode worker at present"));
  }
  std::string address;
  if (leg.prefill.has_value() && prefill.picker.is_up(*leg.prefill)) {
    address = prefill.addresses[*leg.prefill];
  }
  leg.tokens_before = leg.relay->tokens_seen();
  leg.status = 0;
  leg.error_body.clear();
  http::HttpFetchRequest post;
  post.url = workers_.decode.urls[*leg.decode];
  post.method = "POST";
  post.path = exchange_->request().path;
  post.body = leg.relay->next_body(address);
  post.headers = workers_.headers();
  post.headers.emplace_back("Content-Type", "application/json");
  post.headers.emplace_back(http::kRequestIdHeader, request_id_);
  leg.fetch = http::HttpFetch::start(
      workers_.loop, std::move(post),
      {.on_head =
           [&leg](int status, std::string_view retry_after) {
             leg.status = status;
             leg.retry_after = retry_after;
           },
       .on_body = [this, &leg](std::string_view bytes) { received(leg, bytes); },
       .on_end = [this, &leg](const absl::Status& status) { ended(leg, status); }});
}

void RelayedRequest::received(Leg& leg, std::string_view bytes) {
  if (leg.status != 200) {
    if (leg.error_body.size() < kErrorBytes) leg.error_body += bytes;
    return;
  }
  const bool go_on = leg.relay->receive(bytes);
  if (leg.relay->tokens_seen() > leg.tokens_before) {
    leg.prefill.release();  // its part is over
    leg.decode.computed();
  }
  if (!go_on || leg.relay->done()) ended(leg, absl::OkStatus());
}

// OK: done. Cancelled: nobody waits for it. Unavailable: another worker may do better.
// ResourceExhausted: another worker may have room.
absl::Status RelayedRequest::outcome(Leg& leg, const absl::Status& connection) {
  if (leg.relay->done()) return absl::OkStatus();
  if (leg.relay->client_gone()) return absl::CancelledError("the client went away");
  if (!leg.relay->worker_error().ok()) return leg.relay->worker_error();
  if (leg.status != 0 && leg.status != 200) {
    const absl::StatusOr<json> parsed = parse_json(leg.error_body, "a worker's reply");
    const auto message = parsed.ok() ? string_field(member(*parsed, "error"), "message", "")
                                     : absl::StatusOr<std::string>(parsed.status());
    const std::string text = message.ok() ? *message : absl::StrCat("HTTP status ", leg.status);
    if (leg.status == 429) {
      absl::Status full = absl::ResourceExhaustedError(text);
      if (!leg.retry_after.empty() && leg.retry_after.size() < 8) {
        full.SetPayload(http::kRetryAfterPayload, absl::Cord(leg.retry_after));
      }
      return full;
    }
    if (leg.status == 404) return absl::NotFoundError(text);
    return leg.status < 500 ? absl::InvalidArgumentError(text) : absl::UnavailableError(text);
  }
  workers_.decode.picker.set_up(*leg.decode, false);  // until it answers a probe
  const http::HttpUrl& url = workers_.decode.urls[*leg.decode];
  return absl::UnavailableError(
      absl::StrCat("decode worker http://", url.host, ":", url.port, " broke off: ",
                   connection.ok() ? "the stream ended early" : std::string(connection.message())));
}

void RelayedRequest::ended(Leg& leg, const absl::Status& connection) {
  const std::shared_ptr<RelayedRequest> self = self_;  // close() lets go of it
  if (self == nullptr) return;
  const absl::Status status = outcome(leg, connection);
  leg.fetch.reset();
  leg.prefill.release();
  if (!status.ok() && leg.decode.has_value()) leg.failed.push_back(*leg.decode);
  leg.decode.release();
  if (status.ok()) {
    leg.done = true;
    return finish_if_done();
  }
  if (absl::IsCancelled(status)) return close();
  if (!absl::IsUnavailable(status) && !absl::IsResourceExhausted(status)) return fail(status);
  retry(leg, status);
}

void RelayedRequest::retry(Leg& leg, const absl::Status& why) {
  if (absl::IsResourceExhausted(why)) {
    // Nothing was computed: asking each worker once costs little, asking a full one again is
    // what makes it fuller.
    if (leg.failed.size() >= workers_.decode.picker.present()) return fail(why);
    return attempt(leg);
  }
  if (leg.relay->tokens_seen() > leg.tokens_before) leg.retries = 0;
  if (++leg.retries > workers_.max_retries) {
    return fail(
        absl::UnavailableError(absl::StrCat("gave up after ", workers_.max_retries,
                                            " retries; the last: ", std::string(why.message()))));
  }
  if (!workers_.retries.spend()) {
    return fail(absl::UnavailableError(absl::StrCat(
        "gave up: too much is being retried already; the last: ", std::string(why.message()))));
  }
  ++workers_.retried;
  attempt(leg);
}

void RelayedRequest::leave_worker(size_t worker) {
  const std::shared_ptr<RelayedRequest> self = self_;
  for (Leg& leg : legs_) {
    if (self_ == nullptr) return;  // closed meanwhile
    if (leg.done || !leg.decode.has_value() || *leg.decode != worker) continue;
    leg.status = 0;
    ended(leg, absl::UnavailableError("it answers no more"));
  }
}

void RelayedRequest::finish_if_done() {
  std::vector<const StreamRelay*> choices;
  for (const Leg& leg : legs_) {
    if (!leg.done) return;
    choices.push_back(leg.relay.get());
  }
  if (request_->stream) {
    send(end_of_stream(*request_, head_, choices));
    exchange_->end();
  } else {
    exchange_->reply(200, "application/json", whole_reply(*request_, head_, choices));
  }
  close();
}

void RelayedRequest::fail(const absl::Status& status) {
  if (exchange_->begun()) {
    exchange_->write(
        absl::StrCat("data: ", http::api_error(status), "\n\n", std::string(http::kSseDone)));
    exchange_->end();
  } else {
    http::reply_error(status, exchange_.get());
  }
  close();
}

void RelayedRequest::close() {
  workers_.open.erase(this);
  // Workers hear of it by their connections' end.
  for (Leg& leg : legs_) {
    leg.fetch.reset();
    leg.prefill.release();
    leg.decode.release();
  }
  self_.reset();
}

}  // namespace baton::engine::router
