// The engine's step: follow the transfers, schedule, compute, sample, report.
#include "engine/serve/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/base/log.h"

namespace baton::engine::serve {
namespace {

constexpr Time kFailedLoadsApart = std::chrono::seconds(10);  // lines about them, in the log

}  // namespace

absl::Status Engine::add_request(Request request) {
  if (!stopped_.ok()) return stopped_;
  if (absl::Status status = request.sampling.validate(); !status.ok()) return status;
  if (requests_.contains(request.id)) {
    return absl::AlreadyExistsError(absl::StrCat("request ", request.id, " exists already"));
  }
  if (request.tokens.empty()) return absl::InvalidArgumentError("the prompt has no tokens");
  const size_t total = request.tokens.size() + request.resume_tokens.size();
  if (request.tokens.size() >= max_context_ || total > max_context_) {
    return absl::OutOfRangeError(absl::StrCat(
        "the prompt has ", total, " tokens; with at least one token of output that is longer than ",
        "the context of ", max_context_, " tokens (the model's is ",
        model_.config().max_position_embeddings, ", the KV cache holds ",
        size_t{options_.blocks} * kBlockTokens, "): shorten it, or give the cache more --blocks"));
  }
  if (absl::Status status = check_hand_off(request); !status.ok()) return status;
  for (const std::vector<int32_t>* tokens : {&request.tokens, &request.resume_tokens}) {
    for (int32_t token : *tokens) {
      if (token < 0 || token >= model_.config().vocab_size) {
        return absl::InvalidArgumentError(absl::StrCat(
            "token ", token, " is not in the vocabulary of ", model_.config().vocab_size));
      }
    }
  }

  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (token >= model_.config().vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "logit_bias names token ", token, " of a vocabulary of ", model_.config().vocab_size));
    }
  }

  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.tokens = std::move(request.tokens);
  sequence.prompt_tokens = sequence.tokens.size();
  sequence.metrics.prompt_tokens = static_cast<uint32_t>(sequence.prompt_tokens);
  sequence.metrics.arrival = clock_.now();
  // Whoever resumes a stream has heard of its prompt.
  request.sampling.prompt_logprobs &= request.resume_tokens.empty();
  if (request.sampling.prompt_logprobs) {
    sequence.local_only = true;
    sequence.prompt_choices.push_back({.token = sequence.tokens[0], .logprob = 0, .top = {}});
  }
  sequence.text.emplace(tokenizer_, request.sampling.stop);
  const std::vector<int32_t> resumed = std::move(request.resume_tokens);
  if (request.hand_over.has_value()) {
    sequence.send = sessions_->open(*request.hand_over, sequence.prompt_tokens);
  }
  ++(request.asked.has_value() ? asks_ : unbegun_);
  sequence.request = std::move(request);
  requests_.emplace(sequence.request.id, std::move(owned));

  for (int32_t token : resumed) {
    std::string seen;
    const std::optional<FinishReason> reason = accept_token(sequence, token, &seen);
    if (reason.has_value()) {  // the stream broke off behind its last token
      finish(&sequence, *reason, absl::OkStatus());
      return absl::OkStatus();
    }
  }
  scheduler_.add(&sequence);
  return absl::OkStatus();
}

bool Engine::abort(uint64_t id) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return false;
  finish(it->second.get(), FinishReason::kAbort, absl::CancelledError("the request was aborted"));
  return true;
}

void Engine::abort_all(const absl::Status& why) {
  while (!requests_.empty()) finish(requests_.begin()->second.get(), FinishReason::kAbort, why);
}

// Appends an output token. Says whether and why it is the last; `text` is what it lets out.
std::optional<FinishReason> Engine::accept_token(Sequence& sequence, int32_t token,
                                                 std::string* text) {
  const SamplingParams& sampling = sequence.request.sampling;
  const auto& eos = model_.config().eos_token_ids;
  sequence.tokens.push_back(token);
  std::optional<FinishReason> reason;
  const auto& stops = sampling.stop_token_ids;
  if ((!sampling.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) ||
      std::find(stops.begin(), stops.end(), token) != stops.end()) {
    reason = FinishReason::kStop;
  } else {
    *text = sequence.text->push(token);
    if (sequence.text->stopped()) {
      return FinishReason::kStop;
    } else if (sequence.tokens.size() - sequence.prompt_tokens >=
                   static_cast<size_t>(sampling.max_tokens) ||
               sequence.tokens.size() >= max_context_) {
      reason = FinishReason::kLength;
    }
  }
  if (reason.has_value()) *text += sequence.text->finish();
  return reason;
}

void Engine::finish(Sequence* sequence, FinishReason reason, const absl::Status& status,
                    OutputEvent event) {
  event.handed_over = end_hand_off(*sequence, reason, status);
  scheduler_.remove(sequence);
  sequence->metrics.finish = clock_.now();
  if (sequence->request.asked.has_value()) {
    --asks_;
    ++stats_.jobs_finished;
  } else {
    ++stats_.requests_finished;
    if (sequence->metrics.output_tokens == 0) --unbegun_;
  }
  stats_.preemptions += sequence->metrics.preemptions;
  stats_.cached_tokens += sequence->metrics.cached_tokens;
  stats_.loaded_tokens += sequence->metrics.loaded_tokens;
  stats_.tier_tokens += sequence->metrics.tier_tokens;
  event.id = sequence->request.id;
  event.finished = true;
  event.reason = reason;
  event.status = status;
  event.metrics = &sequence->metrics;
  // Its place is free before its client hears of its end.
  const auto ended = requests_.extract(event.id);
  if (sequence->request.on_event) sequence->request.on_event(event);
}

bool Engine::follow_loads() {
  bool changed = false;
  if (loads_.has_value()) loads_->poll();
  if (tiers_ != nullptr) {
    tier_loads_->poll();
    changed |= tiers_->poll();
  }
  std::vector<std::pair<Sequence*, absl::Status>> ended;
  for (Sequence* sequence : scheduler_.loading()) {
    const absl::StatusOr<bool> complete = sequence->source->is_complete(*sequence);
    if (!complete.ok() || *complete) ended.emplace_back(sequence, complete.status());
  }
  for (const auto& [sequence, status] : ended) {
    if (status.ok()) {
      load_finished(sequence);
    } else {
      load_failed(sequence, status);
    }
  }
  return changed || !ended.empty();
}

// What the scheduler has just let out of the queue, to be computed or to wait for its KV.
void Engine::note_admitted(const StepPlan& plan) {
  const Time now = clock_.now();
  for (const auto& [sequence, count] : plan.chunks) {
    if (sequence->metrics.admitted == Time{}) sequence->metrics.admitted = now;
  }
  for (Sequence* sequence : scheduler_.loading()) {
    RequestMetrics& metrics = sequence->metrics;
    if (metrics.loading == Time{}) metrics.loading = now;
    if (metrics.admitted == Time{}) metrics.admitted = now;
  }
}

void Engine::load_ended(Sequence* sequence) {
  const Time begun = std::exchange(sequence->metrics.loading, Time{});
  if (begun != Time{}) sequence->metrics.kv_wait += clock_.now() - begun;
}

void Engine::load_finished(Sequence* sequence) {
  load_ended(sequence);
  RequestMetrics& metrics = sequence->metrics;
  const bool from_tiers = tier_loads_.has_value() && sequence->source == &*tier_loads_;
  (from_tiers ? metrics.tier_tokens : metrics.loaded_tokens) =
      static_cast<uint32_t>(sequence->load_end - metrics.cached_tokens);
  if (!from_tiers) stats_.kv_bytes_loaded += kv_bytes(metrics.loaded_tokens);
  sequence->source->finish(sequence);
  scheduler_.loaded(sequence);
}

// A prompt that is computed twice is expensive and must not go unnoticed: it is counted, told
// with the answer, and logged.
void Engine::note_failed_load(Sequence* sequence, const absl::Status& why) {
  ++stats_.loads_failed;
  sequence->metrics.load_error = why;
  const Time now = clock_.now();
  if (now < log_failed_loads_at_) return;
  log_failed_loads_at_ = now + kFailedLoadsApart;
  base::log_event(
      base::LogLevel::kWarning, "%d KV loads have failed since the last line like this; %s: %s",
      stats_.loads_failed - std::exchange(logged_failed_loads_, stats_.loads_failed),
      sequence->source->may_recompute() ? "the prompt is computed here" : "the request fails",
      std::string(why.message()));
}

void Engine::load_failed(Sequence* sequence, const absl::Status& why) {
  load_ended(sequence);
  note_failed_load(sequence, why);
  if (sequence->source->may_recompute()) {
    sequence->source->give_up(sequence);
    scheduler_.load_failed(sequence);
  } else {
    finish(sequence, FinishReason::kError, why);
  }
}

bool Engine::step(int wake_fd) {
  wake_fd_ = wake_fd;
  bool changed = false;
  if (options_.leader != nullptr) options_.leader->progress();
  if (sessions_.has_value()) changed |= follow_sends();
  if (loads_ || tiers_ != nullptr) changed |= follow_loads();
  if (!stopped_.ok()) return end_all() || changed;
  const StepPlan& plan = scheduler_.schedule();
  note_admitted(plan);
  for (const auto& [sequence, status] : plan.failed) {
    note_failed_load(sequence, status);
    finish(sequence, FinishReason::kError, status);
    changed = true;
  }
  for (const auto& [sequence, status] : plan.not_loaded) note_failed_load(sequence, status);
  if (plan.chunks.empty()) return changed || plan.preempted;
  run(plan);
  if (!stopped_.ok()) end_all();
  return true;
}

// What needs no look at the logits is drawn where they are.
void Engine::let_runner_draw(const StepPlan& plan) {
  draws_.assign(chunks_.size(), {});
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Sequence& sequence = *plan.chunks[i].sequence;
    const SamplingParams& sampling = sequence.request.sampling;
    if (!chunks_[i].wants_logits || sampling.adjusts() || sampling.logprobs >= 0 ||
        sampling.min_p > 0 || sampling.max_tokens == 0) {
      continue;
    }
    draws_[i] = {.temperature = sampling.temperature,
                 .top_p = sampling.top_p,
                 .uniform = uniform_at(sampling.seed, sequence.tokens.size()),
                 .top_k = static_cast<uint32_t>(sampling.top_k)};
    chunks_[i].draw = &draws_[i];
  }
}

absl::Status Engine::compute(const StepPlan& plan) {
  chunks_.clear();
  hook_.begin(plan.chunks.size() > 1 ? 0 : plan.chunks[0].sequence->label());
  for (const auto& [sequence, count] : plan.chunks) {
    const size_t begin = sequence->computed;
    chunks_.push_back({.tokens = std::span(sequence->tokens).subspan(begin, count),
                       .position = static_cast<int32_t>(begin),
                       .block_table = sequence->blocks,
                       .wants_logits = !sequence->request.asked.has_value() &&
                                       begin + count == sequence->tokens.size(),
                       .wants_all_logits = sequence->wants_prompt()});
    stats_.tokens_computed += count;
    if (sequence->send != 0 && !options_.serialize_sends) {
      hook_.hand_over(sequence->send, std::min(begin + count, sequence->prompt_tokens),
                      sequence->blocks, chunks_.size() - 1);
    }
  }
  if (options_.runner != nullptr) let_runner_draw(plan);
  if (plan.streaming != nullptr) {
    hook_.await(plan.streaming->source->source(), plan.streaming->load, wake_fd_);
  }
  ++stats_.steps;
  hook_.on_token_logits([&](size_t chunk, size_t token, std::span<const float> logits) {
    take_logits(plan.chunks[chunk].sequence, token, logits);
  });
  absl::Status status;
  if (options_.leader != nullptr) status = options_.leader->begin_step(chunks_, hook_.sends());
  if (status.ok()) {
    status = runner_->forward(chunks_, memory_->cache(), hook_, logits_.data());
    if (options_.leader != nullptr) options_.leader->end_step(status);
  }
  hook_.end();
  return status;
}

// A runner that is of no use any more stops the engine, whatever the step itself came to.
absl::Status Engine::look_at_runner(absl::Status status) {
  const absl::Status alive = runner_->alive();
  if (alive.ok()) return status;
  stopped_ = stopped_status(
      absl::StrCat("the engine has stopped: ", (status.ok() ? alive : status).message()));
  base::log_event(base::LogLevel::kError, "%s", std::string(stopped_.message()));
  return stopped_;
}

// What an engine that has stopped still had. It is told last that it has: whoever asked hears of
// his request from the request itself.
bool Engine::end_all() {
  const bool some = !requests_.empty();
  while (!requests_.empty()) {
    finish(requests_.begin()->second.get(), FinishReason::kError, stopped_);
  }
  liveness_.stop(std::string(stopped_.message()));
  return some;
}

void Engine::run(const StepPlan& plan) {
  const Time begin = clock_.now();
  const absl::Status status = look_at_runner(compute(plan));
  if (options_.timeline != nullptr) {
    size_t tokens = 0;
    for (const ScheduledChunk& chunk : plan.chunks) tokens += chunk.tokens;
    options_.timeline->add({.track = "step",
                            .name = absl::StrCat(tokens, " tokens, ", plan.chunks.size(), " seqs"),
                            .begin = begin,
                            .end = clock_.now()});
  }
  if (plan.streaming != nullptr) {
    if (hook_.stalled_at().has_value()) {
      stats_.tokens_computed -= plan.chunks[0].tokens;
      ++stats_.loads_stalled;
      scheduler_.stalled(plan.streaming, *hook_.stalled_at());
      return;
    }
    if (!status.ok()) {
      load_failed(plan.streaming, status);
      return;
    }
    load_finished(plan.streaming);
  }
  for (size_t row = 0; row < plan.chunks.size(); ++row) {
    Sequence* sequence = plan.chunks[row].sequence;
    if (status.ok()) {
      advance(plan.chunks[row], row);
    } else {
      finish(sequence, FinishReason::kError, status);
    }
  }
}

// The logits behind a token of a prompt rate the token that comes next in it.
void Engine::take_logits(Sequence* sequence, size_t token, std::span<const float> logits) {
  const size_t next = sequence->computed + token + 1;
  if (next != sequence->prompt_choices.size() || next >= sequence->prompt_tokens) return;
  sequence->prompt_choices.push_back(
      sampler_.rate(logits, sequence->tokens[next], sequence->request.sampling.logprobs));
}

// A chunk was computed: row `row` of the logits is its last token's.
void Engine::advance(const ScheduledChunk& chunk, size_t row) {
  Sequence* sequence = chunk.sequence;
  scheduler_.computed(chunk);
  if (sequence->remaining() > 0) return;

  const size_t vocab = model_.config().vocab_size;
  OutputEvent event;
  RequestMetrics& metrics = sequence->metrics;
  if (sequence->request.sampling.prompt_logprobs && metrics.output_tokens == 0) {
    event.prompt = &sequence->prompt_choices;
  }
  if (sequence->request.sampling.max_tokens == 0) {
    return finish(sequence, FinishReason::kLength, absl::OkStatus(), std::move(event));
  }
  event.id = sequence->request.id;
  event.has_token = true;
  if (const std::optional<int32_t> drawn = runner_->drawn(row)) {
    event.choice.token = *drawn;
  } else {
    event.choice =
        sampler_.choose(std::span(logits_).subspan(row * vocab, vocab), sequence->request.sampling,
                        sequence->tokens.size(),
                        {sequence->tokens, sequence->prompt_tokens, model_.config().eos_token_ids});
  }
  const Time now = clock_.now();
  if (metrics.output_tokens++ == 0) {
    metrics.first_token = now;
    ++stats_.requests_begun;
    --unbegun_;
  } else {
    metrics.gaps.push_back(now - metrics.last_token);
  }
  metrics.last_token = now;
  const std::optional<FinishReason> reason =
      accept_token(*sequence, event.choice.token, &event.text);
  if (reason.has_value()) {
    finish(sequence, *reason, absl::OkStatus(), std::move(event));
  } else if (sequence->request.on_event) {
    sequence->request.on_event(event);
  }
}

}  // namespace baton::engine::serve
