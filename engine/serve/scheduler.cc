// The scheduler: one token budget per step for running, ready and waiting sequences; preemption.
#include "engine/serve/scheduler.h"

#include <algorithm>
#include <optional>

#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {

namespace {

size_t blocks_for(size_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

void Scheduler::add(Sequence* sequence) {
  sequence->state = SequenceState::kWaiting;
  waiting_.push_back(sequence);
}

void Scheduler::remove(Sequence* sequence) {
  std::erase(waiting_, sequence);
  std::erase(ready_, sequence);
  std::erase(running_, sequence);
  std::erase(loading_, sequence);
  if (sequence->load != 0) {
    sequence->source->give_up(sequence);
  } else {
    blocks_.release(sequence->blocks);
    sequence->blocks.clear();
  }
  sequence->state = SequenceState::kDone;
}

void Scheduler::loaded(Sequence* sequence) {
  std::erase(loading_, sequence);
  sequence->computed = sequence->load_end;
  publish(sequence);
  if (sequence->state != SequenceState::kWaitingForRemoteKv) return;  // streamed: runs already
  sequence->state = SequenceState::kReady;
  ready_.push_back(sequence);
}

void Scheduler::load_failed(Sequence* sequence) {
  std::erase(loading_, sequence);
  std::erase(running_, sequence);
  sequence->computed = 0;
  sequence->published = 0;
  sequence->local_only = true;
  sequence->state = SequenceState::kWaiting;
  waiting_.push_front(sequence);
}

void Scheduler::stalled(Sequence* sequence, uint32_t layer) {
  std::erase(running_, sequence);
  sequence->state = SequenceState::kWaitingForRemoteKv;
  sequence->layers_wanted = layer + 1;
}

bool Scheduler::reserve(Sequence* sequence, size_t tokens) {
  const size_t needed = blocks_for(tokens);
  if (needed <= sequence->blocks.size()) return true;
  return blocks_.allocate(needed - sequence->blocks.size(), &sequence->blocks);
}

// Makes the sequence that was admitted last, at or behind running_[index], give up its blocks.
// False if that was running_[index] itself. What other engines have asked for holds all its blocks
// from the start and may have them in flight, so it is passed over.
bool Scheduler::preempt_for(size_t index) {
  size_t victim = running_.size() - 1;
  while (victim > index && running_[victim]->request.asked.has_value()) --victim;
  Sequence* sequence = running_[victim];
  running_.erase(running_.begin() + static_cast<ptrdiff_t>(victim));
  if (sequence->send != 0) sessions_->restart(sequence->send);
  blocks_.release(sequence->blocks);
  sequence->blocks.clear();
  sequence->computed = 0;
  sequence->published = 0;
  sequence->borrowed = false;  // what was loaded is computed here now
  sequence->state = SequenceState::kWaiting;
  ++sequence->metrics.preemptions;
  waiting_.push_front(sequence);
  plan_.preempted = true;
  return victim != index;
}

void Scheduler::schedule_running() {
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    Sequence* sequence = running_[i];
    const size_t tokens = std::min(sequence->remaining(), budget_);
    while (!reserve(sequence, sequence->computed + tokens)) {
      if (!preempt_for(i)) return;
    }
    plan_.chunks.push_back({sequence, tokens});
    budget_ -= tokens;
  }
}

void Scheduler::start(Sequence* sequence, size_t tokens) {
  sequence->state = SequenceState::kRunning;
  running_.push_back(sequence);
  plan_.chunks.push_back({sequence, tokens});
  budget_ -= tokens;
}

void Scheduler::schedule_ready() {
  while (!ready_.empty() && budget_ > 0 && running_.size() < options_.max_sequences) {
    Sequence* sequence = ready_.front();
    ready_.pop_front();
    start(sequence, std::min(sequence->remaining(), budget_));
  }
}

void Scheduler::schedule_waiting() {
  while (!waiting_.empty() && !plan_.preempted && admit(waiting_.front())) {
  }
}

// Takes the head of the queue out of it if there is room for it; false if it has to stay.
bool Scheduler::admit(Sequence* sequence) {
  const size_t total = sequence->tokens.size();
  extend_chain(sequence->tokens, kBlockTokens, options_.root, &sequence->chain);
  // The last token is always computed, for its logits or to hand the rest over.
  const size_t useful =
      options_.prefix_cache && !sequence->wants_prompt() ? (total - 1) / kBlockTokens : 0;
  const auto chain = std::span(sequence->chain).first(useful);
  const BlockManager::Match match = blocks_.find(chain);
  const size_t cached = match.blocks * kBlockTokens;

  size_t in_tiers = 0;
  if (tiers_ != nullptr && !sequence->local_only) {
    const std::optional<size_t> found = tiers_->find(chain, match.blocks);
    if (!found.has_value()) return false;  // soon
    in_tiers = *found * kBlockTokens;
  }
  // What is left behind the blocks of the tiers is computed here, if it is not much.
  const bool remote = loads_ != nullptr && loads_->wants(*sequence, cached + in_tiers);
  const bool load = remote || in_tiers > 0;
  if (load ? loading_.size() + ready_.size() >= options_.max_sequences
           : budget_ == 0 || running_.size() >= options_.max_sequences) {
    return false;
  }
  const size_t tokens = std::min(total - cached, budget_);
  const bool whole = load || sequence->request.asked.has_value();
  const size_t fresh = blocks_for(whole ? total : cached + tokens) - match.blocks;
  if (fresh + match.free_blocks > blocks_.free_blocks()) return false;

  waiting_.pop_front();
  blocks_.acquire(chain, &sequence->blocks);
  (void)blocks_.allocate(fresh, &sequence->blocks);
  sequence->computed = cached;
  sequence->published = match.blocks;
  if (sequence->metrics.preemptions == 0) {
    sequence->metrics.cached_tokens = static_cast<uint32_t>(cached);
  }
  if (remote) {
    load_from(*loads_, sequence, RemoteLoads::loadable(*sequence));
    return true;
  }
  if (sessions_ != nullptr && sequence->request.remote_prefill.has_value()) {
    sessions_->decline(*sequence->request.remote_prefill);
    sequence->request.remote_prefill.reset();
  }
  if (load) {
    load_from(*tier_loads_, sequence, cached + in_tiers);
    return true;
  }
  start(sequence, tokens);
  return true;
}

void Scheduler::load_from(RemoteLoads& source, Sequence* sequence, size_t tokens) {
  const absl::Status status = source.start(sequence, tokens);
  if (status.ok()) {
    sequence->state = SequenceState::kWaitingForRemoteKv;
    loading_.push_back(sequence);
    return;
  }
  blocks_.release(sequence->blocks);
  sequence->blocks.clear();
  if (source.may_recompute()) {
    load_failed(sequence);
    plan_.not_loaded.emplace_back(sequence, status);
  } else {
    sequence->state = SequenceState::kDone;
    plan_.failed.emplace_back(sequence, status);
  }
}

// With nothing else to compute, the engine may as well wait for layers inside the forward pass.
void Scheduler::schedule_streaming() {
  if (!plan_.chunks.empty() || !running_.empty()) return;
  for (Sequence* sequence : loading_) {
    if (sequence->send != 0) continue;  // what is handed over is not computed twice
    if (sequence->source->layers(*sequence) < sequence->layers_wanted) continue;
    sequence->computed = sequence->load_end;
    plan_.streaming = sequence;
    start(sequence, std::min(sequence->remaining(), budget_));
    return;
  }
}

const StepPlan& Scheduler::schedule() {
  plan_.chunks.clear();
  plan_.failed.clear();
  plan_.not_loaded.clear();
  plan_.streaming = nullptr;
  budget_ = options_.token_budget;
  plan_.preempted = false;
  schedule_running();
  schedule_ready();
  schedule_waiting();
  schedule_streaming();
  return plan_;
}

void Scheduler::publish(Sequence* sequence) {
  // Others would get text that depends on who computed its beginning.
  if (sequence->borrowed) return;
  const size_t full = sequence->computed / kBlockTokens;
  extend_chain(sequence->tokens, kBlockTokens, options_.root, &sequence->chain);
  for (; sequence->published < full; ++sequence->published) {
    const uint32_t block = sequence->blocks[sequence->published];
    const BlockHash& hash = sequence->chain[sequence->published];
    blocks_.publish(block, hash);
    if (tiers_ != nullptr && blocks_.holds(block, hash)) tiers_->published(block, hash);
  }
}

void Scheduler::computed(const ScheduledChunk& chunk) {
  chunk.sequence->computed += chunk.tokens;
  publish(chunk.sequence);
}

}  // namespace baton::engine::serve
