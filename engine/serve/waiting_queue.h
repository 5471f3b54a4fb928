// The sequences that wait for a place in the batch, with what they ask for in all.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <vector>

#include "engine/serve/requests/sequence.h"

namespace baton::engine::serve {

// A sequence must not change while it is in here; it has nothing computed. Sums leave out jobs.
class WaitingQueue {
 public:
  void push_back(Sequence* sequence);
  void push_front(Sequence* sequence);  // preempted, or its load failed
  void pop_front();
  void erase(Sequence* sequence);  // if it is in here

  Sequence* front() const { return queue_.front(); }
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  auto begin() const { return queue_.begin(); }
  auto end() const { return queue_.end(); }

  // Tokens still to be computed before the next one can be chosen.
  size_t prompt_tokens() const { return prompt_tokens_; }
  // Output to expect where a request makes `mean` tokens, or what it may if that is less; at least
  // one for each. Costs what the different limits below `mean` are, and the preempted sequences.
  size_t output_tokens(size_t mean) const;

 private:
  void count(const Sequence& sequence);
  void forget(const Sequence& sequence);

  std::deque<Sequence*> queue_;
  size_t prompt_tokens_ = 0;
  size_t fresh_ = 0;                     // without output yet
  std::map<size_t, size_t> fresh_with_;  // how many of these have this max_tokens
  std::vector<const Sequence*> begun_;
};

// Output to expect of a sequence where `mean` tokens are usual: at least one more.
size_t expected_output(const Sequence& sequence, size_t mean);

}  // namespace baton::engine::serve
