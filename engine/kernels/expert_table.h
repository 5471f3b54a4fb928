// Maps tokens to their experts, and experts to their tokens.
//
// The choice of a token follows from its own logits alone. Tokens are then listed by expert, so
// that the weights of an expert are read once for all of its tokens, and those of an expert without
// tokens never. Experts come in ascending number, so what they say of one token is added up in that
// order, whatever other tokens a step has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/kernels/aligned.h"

namespace baton::engine {

// Memory for one step, allocated once.
class ExpertTable {
 public:
  // The tokens of one expert: slots [first, first + count).
  struct Group {
    int expert;
    int first;
    int count;
  };
  struct Slot {
    int token;
    float weight;
  };

  ExpertTable() = default;  // for models without experts
  // `per_token` of `experts` are chosen for each of at most `max_tokens` tokens, by `threads`
  // threads. `normalise`: the weights of a token's experts are made to sum to one.
  ExpertTable(int experts, int per_token, bool normalise, int max_tokens, int threads);

  // Router logits of a token go to logits() + token * stride(), one for each expert.
  float* logits() { return logits_.data(); }
  size_t stride() const { return stride_; }

  // Softmax of the token's logits over all experts; chosen are the most probable, of equals those
  // of lower number. Their probabilities are the weights. Any thread; `thread` is its number.
  void choose(int token, int thread);

  // When all tokens in [0, tokens) have chosen.
  void group(int tokens);
  std::span<const Group> groups() const { return groups_; }  // in ascending number of the expert
  const Slot& slot(int index) const { return slots_[static_cast<size_t>(index)]; }
  // The slot of the token's expert number `number`, counted in ascending order of the experts.
  int place(int token, int number) const {
    return places_[static_cast<size_t>(token) * static_cast<size_t>(per_token_) +
                   static_cast<size_t>(number)];
  }
  int per_token() const { return per_token_; }
  // That number's choice of a token that has chosen.
  int expert(int token, int number) const { return choice(token, number).expert; }
  float weight(int token, int number) const { return choice(token, number).weight; }
  int slots() const { return static_cast<int>(slots_.size()); }  // per_token of each token

  size_t bytes() const;

 private:
  struct Choice {
    int expert;
    float weight;
  };
  const Choice& choice(int token, int number) const {
    return choices_.data()[static_cast<size_t>(token) * static_cast<size_t>(per_token_) +
                           static_cast<size_t>(number)];
  }
  int experts_ = 0;
  int per_token_ = 0;
  bool normalise_ = false;
  size_t stride_ = 0;             // experts, up to whole vectors
  AlignedArray<float> logits_;    // [tokens][stride]; choose() makes probabilities of them
  AlignedArray<uint64_t> order_;  // [threads][experts], scratch
  AlignedArray<Choice> choices_;  // [tokens][per token], in ascending number
  std::vector<int> next_;         // of each expert: the slot of its next token
  std::vector<Group> groups_;
  std::vector<Slot> slots_;
  std::vector<int> places_;  // [tokens][per token]
};

}  // namespace baton::engine
