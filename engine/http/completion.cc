// Submitting choices, and turning their events into bytes for the client.
#include "engine/http/completion.h"

#include "absl/strings/ascii.h"
#include "engine/http/request_check.h"

namespace baton::engine::http {

Completion::Completion(const CompletionHost& host, std::shared_ptr<HttpExchange> exchange,
                       std::shared_ptr<const ApiRequest> request,
                       std::vector<size_t> prompt_lengths)
    : host_(host),
      exchange_(std::move(exchange)),
      request_(std::move(request)),
      first_token_(waits_for_first_token(exchange_->request(), *request_)),
      reply_(request_, host.model, make_request_id(), host.tokenizer, std::move(prompt_lengths)) {}

bool waits_for_first_token(const HttpRequest& asked, const ApiRequest& request) {
  return request.stream && asked.header(absl::AsciiStrToLower(kWaitsForHeader)) != "answer";
}

absl::Status Completion::start(const CompletionHost& host, std::shared_ptr<HttpExchange> exchange,
                               std::shared_ptr<const ApiRequest> request,
                               std::vector<std::vector<int32_t>> prompts) {
  const absl::Status admitted =
      host.engine.admit(waits_for_first_token(exchange->request(), *request), request->choices());
  if (!admitted.ok()) return admitted;
  std::vector<size_t> lengths;
  for (const std::vector<int32_t>& prompt : prompts) lengths.push_back(prompt.size());
  const auto completion = std::make_shared<Completion>(host, std::move(exchange),
                                                       std::move(request), std::move(lengths));
  completion->exchange_->on_gone([weak = std::weak_ptr<Completion>(completion)] {
    if (const auto gone = weak.lock(); gone != nullptr) gone->abort();
  });
  completion->submit(std::move(prompts));
  return absl::OkStatus();
}

void Completion::submit(std::vector<std::vector<int32_t>> prompts) {
  const auto n = static_cast<size_t>(request_->n);
  for (size_t choice = 0; choice < request_->choices(); ++choice) {
    serve::Request request;
    request.tokens = prompts[choice / n];
    request.resume_tokens = request_->resume_tokens;
    request.sampling = request_->sampling;
    request.sampling.seed = seed_of_choice(request_->sampling.seed, static_cast<int>(choice % n));
    request.prefill_address = request_->prefill_address;
    request.remote_prefill = request_->remote_prefill;
    request.hand_over = request_->hand_over;
    if (request.hand_over.has_value() && request.hand_over->empty()) {
      request.hand_over = make_request_id();
    }
    request.on_event = [self = shared_from_this(), choice](const serve::OutputEvent& event) {
      self->push(choice, event);
    };
    const uint64_t id = host_.engine.submit(std::move(request));
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
    if (!aborted_) continue;
    host_.engine.abort(id);
    return;
  }
}

void Completion::abort() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(aborted_, true)) return;
  for (const uint64_t id : ids_) host_.engine.abort(id);
}

void Completion::push(size_t choice, const serve::OutputEvent& event) {
  if (event.finished) {
    host_.metrics->observe(*event.metrics, event.reason);
    const bool aborted = event.reason == serve::FinishReason::kAbort;
    const bool unanswered = aborted && !(first_token_ && event.metrics->output_tokens > 0);
    if (unanswered || event.status.ok()) {
      host_.engine.note_end(first_token_, !unanswered, *event.metrics);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    events_.emplace_back(choice, StreamedEvent::copy(event));
    if (std::exchange(draining_, true)) return;
  }
  if (const auto loop = host_.loop.lock(); loop != nullptr) {
    loop->post([self = shared_from_this()] { self->drain(); });
  }
}

void Completion::drain() {
  std::deque<std::pair<size_t, StreamedEvent>> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    draining_ = false;
  }
  std::string bytes;
  for (auto& [choice, event] : events) {
    if (!over_) handle(choice, std::move(event), &bytes);
  }
  if (bytes.empty()) return;
  if (!exchange_->begun()) exchange_->begin(200, "text/event-stream");
  exchange_->write(std::move(bytes));
  if (over_) exchange_->end();
}

void Completion::handle(size_t choice, StreamedEvent event, std::string* bytes) {
  const serve::OutputEvent& seen = event.view();
  const bool failed = seen.finished && !seen.status.ok();
  if (failed) {
    over_ = true;
    abort();
    // The first byte of the answer decides about its status.
    if (!request_->stream || (!exchange_->begun() && bytes->empty())) {
      return reply_error(seen.status, exchange_.get());
    }
  }
  if (request_->stream) {
    *bytes += reply_.stream_event(choice, seen);
    over_ = over_ || reply_.finished();
    return;
  }
  reply_.add(choice, seen);
  if (!reply_.finished()) return;
  over_ = true;
  exchange_->reply(200, "application/json", reply_.whole());
}

}  // namespace baton::engine::http
