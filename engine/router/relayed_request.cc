// A request's way through the workers.
#include "engine/router/relayed_request.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/http/request_check.h"
#include "engine/serve/liveness.h"
#include "transport/base/log.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;

constexpr size_t kErrorBytes = 65536;
// Bytes of a request in flight to workers that have not begun to answer; one choice always goes.
constexpr size_t kAskedAtOnce = size_t{4} << 20;
// How often a request without a worker looks for one.
constexpr std::chrono::milliseconds kLookAgain{20};

// A payload of the error of a worker that died or answers no more: another one is asked, and no
// retry budget pays for that.
constexpr char kLostPayload[] = "worker_lost";

bool has(const absl::Status& status, const char* payload) {
  return status.GetPayload(payload).has_value();
}

}  // namespace

RelayedRequest::RelayedRequest(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                               std::shared_ptr<const WorkerBody> body,
                               std::shared_ptr<const http::ApiRequest> request,
                               std::string request_id)
    : workers_(workers),
      exchange_(std::move(exchange)),
      body_(std::move(body)),
      request_(std::move(request)),
      request_id_(std::move(request_id)) {}

void RelayedRequest::start(Workers& workers, std::shared_ptr<http::HttpExchange> exchange,
                           std::shared_ptr<const WorkerBody> body,
                           std::shared_ptr<const http::ApiRequest> request,
                           const std::vector<std::shared_ptr<const PromptKey>>& keys,
                           std::string request_id) {
  if (exchange->gone()) return;
  const auto relayed = std::make_shared<RelayedRequest>(
      workers, std::move(exchange), std::move(body), std::move(request), std::move(request_id));
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
    leg.key = keys[choice / static_cast<size_t>(parsed.n)];
    leg.relay = std::make_unique<StreamRelay>(
        relayed->body_, relayed->request_, choice, relayed->head_,
        [request = relayed.get()](std::string_view bytes) { return request->send(bytes); });
  }
  if (workers.ending) return relayed->end_early();
  relayed->ask_more();
}

void RelayedRequest::end_early() {
  const std::shared_ptr<RelayedRequest> self = self_;
  if (self != nullptr) fail(serve::stopped_status("this router is shutting down: ask another one"));
}

void RelayedRequest::ask_more() {
  const std::shared_ptr<RelayedRequest> self = self_;  // where it is the last one that fails
  size_t on_the_way = 0;
  for (size_t i = 0; i < asked_; ++i) {
    const Attempt* attempt = legs_[i].attempt.get();
    if (attempt != nullptr && attempt->status == 0) on_the_way += body_->size(i);
  }
  while (self_ != nullptr && asked_ < legs_.size()) {
    on_the_way += body_->size(asked_);
    if (on_the_way > kAskedAtOnce && on_the_way > body_->size(asked_)) return;
    attempt(legs_[asked_++]);
  }
}

bool RelayedRequest::send(std::string_view bytes) {
  if (exchange_->gone()) return false;
  if (!exchange_->begun()) exchange_->begin(200, "text/event-stream");
  exchange_->write(std::string(bytes));
  return true;
}

void RelayedRequest::attempt(Leg& leg) {
  leg.attempt = std::make_unique<Attempt>();
  Attempt& attempt = *leg.attempt;
  leg.tokens_before = std::max(leg.tokens_before, leg.relay->tokens_seen());
  if (leg.relay->lacks_ids()) start_over(leg);  // retry() has seen to it that nothing was shown
  bool resume = leg.relay->tokens_seen() > 0;
  const auto pick = [&] {
    attempt.decode =
        Place(workers_.decode, workers_.decode.pick(*leg.key, leg.failed, leg.model, resume));
  };
  pick();
  if (!attempt.decode.has_value() && resume && !request_->stream) {
    start_over(leg);
    resume = leg.relay->tokens_seen() > 0;
    pick();
  }
  if (!attempt.decode.has_value()) {
    return fail(absl::UnavailableError(
        !leg.model.empty()
            ? "there is no other decode worker with the model of the answer in progress"
        : resume ? "no decode worker can continue the answer in progress"
                 : "no decode worker is available"));
  }
  if (workers_.lacks_prefill(*attempt.decode)) {
    return fail(absl::UnavailableError(
        absl::StrCat("there is no decode worker for these prefill workers: ", kNoPrefillForIt)));
  }
  leg.relay->begin();
  if (pick_prefill(leg, attempt) == Way::kParams) {
    ask_prefill(leg, attempt);
  } else {
    post(leg, attempt, leg.relay->next_body(address_of(attempt)));
  }
}

// For a choice of which the client has seen nothing.
void RelayedRequest::start_over(Leg& leg) {
  leg.relay->start_over();
  leg.model.clear();
}

http::HttpHeaders RelayedRequest::headers() const {
  http::HttpHeaders headers = workers_.headers();
  headers.emplace_back("Content-Type", "application/json");
  headers.emplace_back(http::kRequestIdHeader, request_id_);
  // Workers are asked for streams, and would take its patience for one with the first token.
  if (!request_->stream) headers.emplace_back(http::kWaitsForHeader, "answer");
  return headers;
}

void RelayedRequest::post(Leg& leg, Attempt& attempt, std::vector<http::SharedBytes> body) {
  http::HttpFetchRequest post;
  post.url = attempt.decode->url;
  post.method = "POST";
  post.path = exchange_->request().path;
  post.body = std::move(body);
  post.headers = headers();
  post.trust = workers_.trust;
  post.has_answered = attempt.decode->answered;
  attempt.fetch = http::HttpFetch::start(
      workers_.loop, std::move(post),
      {.on_head =
           [this, &attempt](int status, std::string_view retry_after) {
             attempt.status = status;
             attempt.retry_after = retry_after;
             if (status == 200) ask_more();
           },
       .on_body = [this, &leg, &attempt](std::string_view bytes) { received(leg, attempt, bytes); },
       .on_end = [this, &leg,
                  &attempt](const absl::Status& status) { ended(leg, attempt, status); }});
}

void RelayedRequest::received(Leg& leg, Attempt& attempt, std::string_view bytes) {
  if (attempt.status != 200) {
    if (attempt.error_body.size() < kErrorBytes) attempt.error_body += bytes;
    return;
  }
  const size_t before = leg.relay->news();
  const bool go_on = leg.relay->receive(bytes);
  if (leg.relay->news() > before) note_news(leg);
  if (!go_on || leg.relay->done()) ended(leg, attempt, absl::OkStatus());
}

void RelayedRequest::note_news(Leg& leg) {
  Attempt& attempt = *leg.attempt;
  if (!attempt.answered) {
    attempt.answered = true;
    attempt.prefill.release();  // its part is over
  }
  leg.model = attempt.decode->model;
}

// OK: done. Cancelled: no client waits for it. Unavailable: another worker may do better.
// ResourceExhausted: another worker may have room. With kLostPayload where the worker is lost.
absl::Status RelayedRequest::outcome(const Leg& leg, const Attempt& attempt,
                                     const absl::Status& connection) {
  if (leg.relay->done()) return absl::OkStatus();
  if (leg.relay->client_gone()) return absl::CancelledError("the client went away");
  if (!leg.relay->worker_error().ok()) {
    note_stopped(attempt, leg.relay->worker_error());
    return leg.relay->worker_error();
  }
  if (attempt.status != 0 && attempt.status != 200) {
    const absl::StatusOr<json> parsed = parse_json(attempt.error_body, "a worker's reply");
    const auto message = parsed.ok() ? string_field(member(*parsed, "error"), "message", "")
                                     : absl::StatusOr<std::string>(parsed.status());
    const std::string text = !message.value_or("").empty()
                                 ? *message
                                 : absl::StrCat("decode worker ", attempt.decode->name(),
                                                " answered with HTTP status ", attempt.status);
    if (attempt.status == 429) {
      absl::Status full = absl::ResourceExhaustedError(text);
      if (!attempt.retry_after.empty() && attempt.retry_after.size() < 8) {
        full.SetPayload(http::kRetryAfterPayload, absl::Cord(attempt.retry_after));
      }
      return full;
    }
    const auto said = parsed.ok() ? string_field(member(*parsed, "error"), "code", "")
                                  : absl::StatusOr<std::string>(parsed.status());
    const bool is_error = attempt.status >= 400 && attempt.status < 600;
    absl::Status error = error_of_worker(is_error ? attempt.status : 502, text, said.value_or(""));
    note_stopped(attempt, error);
    return error;
  }
  const bool not_sent = has(connection, http::kNotSentPayload);
  workers_.set_down(
      workers_.decode, *attempt.decode,
      not_sent ? std::string(connection.message()) : "it closed the connection early");
  absl::Status lost = absl::UnavailableError(
      absl::StrCat("decode worker ", attempt.decode->name(), " broke off: ",
                   connection.ok() ? "the stream ended early" : std::string(connection.message())));
  lost.SetPayload(kLostPayload, absl::Cord());
  if (not_sent) lost.SetPayload(http::kNotSentPayload, absl::Cord());
  return lost;
}

void RelayedRequest::note_stopped(const Attempt& attempt, const absl::Status& error) {
  if (!has(error, serve::kStoppedPayload)) return;
  workers_.set_down(workers_.decode, *attempt.decode, std::string(error.message()));
}

void RelayedRequest::ended(Leg& leg, Attempt& attempt, const absl::Status& connection) {
  const std::shared_ptr<RelayedRequest> self = self_;  // close() lets go of it
  if (self == nullptr) return;
  absl::Status status = outcome(leg, attempt, connection);
  // It may be what was handed over, which vLLM fails at unless it is told to compute instead. Nor
  // need it be the client's fault what is refused then.
  const bool handed_over = !status.ok() && attempt.ask != nullptr;
  // Decode may fail at what a dead prefill worker did not hand over.
  if (handed_over && attempt.prefill.has_value() && !attempt.prefill->up) {
    status.SetPayload(kLostPayload, absl::Cord());
  }
  const bool is_refused = !absl::IsUnavailable(status) && !absl::IsResourceExhausted(status);
  const bool once_more =
      is_refused && handed_over && !attempt.answered && !absl::IsCancelled(status);
  leg.computed_alone |= handed_over;
  if (!status.ok() && !once_more) leg.failed.push_back(*attempt.decode);
  const bool another_may_do_better = !status.ok() && (!is_refused || once_more);
  leg.attempt.reset();
  if (status.ok()) {
    leg.done = true;
    ask_more();
    return finish_if_done();
  }
  if (absl::IsCancelled(status)) return close();
  if (!another_may_do_better) return fail(status);
  if (!once_more) return retry(leg, status);
  if (!has(status, kLostPayload) && !workers_.retries.spend()) return fail(status);
  ++workers_.retried;
  this->attempt(leg);
}

void RelayedRequest::retry(Leg& leg, const absl::Status& why) {
  // Another worker would repeat what the client already has.
  if (request_->stream && leg.relay->lacks_ids()) {
    return give_up(
        "no other worker can continue an answer whose worker did not report token ids "
        "(return_token_ids)",
        why);
  }
  if (absl::IsResourceExhausted(why)) {
    // Nothing was computed: asking each worker once costs little, asking a full one again is
    // what makes it fuller.
    if (leg.failed.size() >= workers_.decode.present()) return fail(why);
    return attempt(leg);
  }
  if (leg.relay->tokens_seen() > leg.tokens_before) leg.retries = 0;
  // A worker that is dead, or says that it has stopped, is asked nothing more: what goes on
  // elsewhere for that is no more than it had. max_retries keeps a request that kills workers from
  // killing them all; one that was never sent killed none.
  const bool left_behind = has(why, kLostPayload) || has(why, serve::kStoppedPayload);
  if (!has(why, http::kNotSentPayload) && ++leg.retries > workers_.max_retries) {
    return give_up(absl::StrCat("gave up after ", workers_.max_retries, " retries"), why);
  }
  if (!left_behind && !workers_.retries.spend()) {
    return give_up("gave up: too much is being retried already", why);
  }
  ++workers_.retried;
  left_behind ? await_worker(leg, why) : attempt(leg);
}

void RelayedRequest::await_worker(Leg& leg, const absl::Status& why) {
  // The client of a non-streamed answer has seen nothing of it: any worker may start over.
  const bool resume = request_->stream && leg.relay->tokens_seen() > 0;
  const Workers::Hope hope =
      workers_.hope(request_->stream ? leg.model : "", resume, Clock::steady().now());
  if (hope == Workers::Hope::kNow) return attempt(leg);
  if (hope == Workers::Hope::kNone) {
    return give_up("gave up: no decode worker is left that can continue", why);
  }
  leg.look = workers_.loop->after(kLookAgain, [this, &leg, why] {
    const std::shared_ptr<RelayedRequest> self = self_;
    if (self != nullptr) await_worker(leg, why);
  });
}

void RelayedRequest::give_up(const std::string& text, const absl::Status& last) {
  absl::Status status =
      absl::UnavailableError(absl::StrCat(text, "; the last: ", std::string(last.message())));
  if (const auto code = last.GetPayload(http::kHttpStatusPayload); code.has_value()) {
    status.SetPayload(http::kHttpStatusPayload, *code);
  }
  fail(status);
}

void RelayedRequest::leave_worker(size_t worker) {
  const std::shared_ptr<RelayedRequest> self = self_;
  for (Leg& leg : legs_) {
    if (self_ == nullptr) return;  // closed meanwhile
    if (leg.attempt == nullptr || *leg.attempt->decode != worker) continue;
    leg.attempt->status = 0;
    ended(leg, *leg.attempt, absl::UnavailableError("it no longer answers"));
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
    leg.attempt.reset();
    leg.look.reset();
  }
  self_.reset();
}

// A request's way through pairs: which prefill worker hands its KV over to the decode worker that
// was picked, and how; what becomes of it when prefill does not.

namespace {

// Tokens of a prompt, where they are known: as --min-remote-tokens is by default.
constexpr size_t kWorthTheWay = 32;

}  // namespace

// A short prompt, or one that decode must compute, is not worth the way; and what is behind a
// prompt prefill workers are not told.
bool RelayedRequest::may_use_params(const Leg& leg) const {
  if (leg.computed_alone || leg.relay->tokens_seen() > 0) return false;
  if (request_->sampling.prompt_logprobs) return false;
  return leg.key->tokens == 0 || leg.key->tokens >= kWorthTheWay;
}

Way RelayedRequest::pick_prefill(const Leg& leg, Attempt& attempt) {
  WorkerGroup& prefill = workers_.prefill;
  const bool by_params = may_use_params(leg);
  std::vector<size_t> avoid;
  const size_t to = *attempt.decode;
  const auto way = [&](size_t from) {
    const Way its = workers_.way(from, to);
    return its == Way::kParams && !by_params ? Way::kNone : its;
  };
  for (size_t i = 0; i < prefill.size(); ++i) {
    if (way(i) == Way::kNone) avoid.push_back(i);
  }
  const std::string& model = workers_.decode[to].model;
  if (!prefill.has_other(avoid, model)) return Way::kNone;
  attempt.prefill = Place(prefill, prefill.pick(*leg.key, avoid, model));
  return way(*attempt.prefill);
}

// The address of the connector that decode asks; "": none.
std::string RelayedRequest::address_of(const Attempt& attempt) const {
  return attempt.prefill.has_value() ? attempt.prefill->address : "";
}

void RelayedRequest::ask_prefill(Leg& leg, Attempt& attempt) {
  const size_t worker = *attempt.prefill;
  const KvAgent& agent = attempt.prefill->agent;
  const bool at_once = agent.known();
  const std::string transfer = at_once ? http::make_request_id() : "";
  attempt.ask =
      PrefillAsk::start(workers_, worker, exchange_->request().path,
                        leg.relay->body_at_prefill(params_at_prefill(transfer)), headers(),
                        [this, &leg, &attempt](const absl::StatusOr<std::string>& params) {
                          prefill_answered(leg, attempt, params);
                        });
  if (!at_once) return;
  ++workers_.handed_over;
  post(leg, attempt, leg.relay->body_behind_prefill(params_behind(agent, transfer)));
}

void RelayedRequest::prefill_answered(Leg& leg, Attempt& attempt,
                                      const absl::StatusOr<std::string>& params) {
  if (self_ == nullptr || attempt.answered) return;
  if (!params.ok()) return compute_alone(leg, attempt);
  if (attempt.fetch != nullptr) return;  // decode knows already
  ++workers_.handed_over;
  post(leg, attempt, leg.relay->body_behind_prefill(*params));
}

// Nothing comes from prefill, and decode, which may be waiting for it, has to hear of that.
void RelayedRequest::compute_alone(Leg& leg, Attempt& attempt) {
  const std::shared_ptr<RelayedRequest> self = self_;
  ++workers_.not_handed_over;
  attempt.prefill.release();
  attempt.status = 0;
  attempt.error_body.clear();
  leg.relay->begin();
  post(leg, attempt, leg.relay->next_body(""));
  attempt.ask.reset();
}

void RelayedRequest::leave_prefill(size_t worker) {
  const std::shared_ptr<RelayedRequest> self = self_;
  for (Leg& leg : legs_) {
    if (self_ == nullptr) return;  // closed meanwhile
    Attempt* const attempt = leg.attempt.get();
    if (attempt == nullptr || attempt->ask == nullptr || attempt->answered) continue;
    if (attempt->prefill.has_value() && *attempt->prefill == worker) compute_alone(leg, *attempt);
  }
}

}  // namespace baton::engine::router
