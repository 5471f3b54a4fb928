// Keeps the sums over waiting sequences up to date as these come and go.
#include "engine/serve/waiting_queue.h"

#include <algorithm>

namespace baton::engine::serve {

size_t expected_output(const Sequence& sequence, size_t mean) {
  const size_t made = sequence.tokens.size() - sequence.prompt_tokens;
  const size_t most = std::min(static_cast<size_t>(sequence.request.sampling.max_tokens), mean);
  return most > made ? most - made : 1;
}

void WaitingQueue::push_back(Sequence* sequence) {
  queue_.push_back(sequence);
  count(*sequence);
}

void WaitingQueue::push_front(Sequence* sequence) {
  queue_.push_front(sequence);
  count(*sequence);
}

void WaitingQueue::pop_front() {
  forget(*queue_.front());
  queue_.pop_front();
}

void WaitingQueue::erase(Sequence* sequence) {
  if (std::erase(queue_, sequence) > 0) forget(*sequence);
}

void WaitingQueue::count(const Sequence& sequence) {
  if (sequence.job.has_value()) return;
  prompt_tokens_ += sequence.remaining();
  if (sequence.tokens.size() > sequence.prompt_tokens) {
    begun_.push_back(&sequence);
  } else {
    ++fresh_;
    ++fresh_with_[static_cast<size_t>(sequence.request.sampling.max_tokens)];
  }
}

void WaitingQueue::forget(const Sequence& sequence) {
  if (sequence.job.has_value()) return;
  prompt_tokens_ -= sequence.remaining();
  if (std::erase(begun_, &sequence) > 0) return;
  --fresh_;
  const auto it = fresh_with_.find(static_cast<size_t>(sequence.request.sampling.max_tokens));
  if (--it->second == 0) fresh_with_.erase(it);
}

size_t WaitingQueue::output_tokens(size_t mean) const {
  size_t tokens = 0, longer = fresh_;
  for (auto it = fresh_with_.begin(); it != fresh_with_.end() && it->first < mean; ++it) {
    tokens += it->first * it->second;
    longer -= it->second;
  }
  tokens += longer * std::max<size_t>(mean, 1);
  for (const Sequence* sequence : begun_) tokens += expected_output(*sequence, mean);
  return tokens;
}

}  // namespace baton::engine::serve
