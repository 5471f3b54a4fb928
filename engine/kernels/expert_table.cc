// ExpertTable: top-k of a softmax, and a counting sort.
#include "engine/kernels/expert_table.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>

#include "engine/kernels/elementwise.h"

namespace baton::engine {

ExpertTable::ExpertTable(int experts_of_layer, int per_token, bool normalise, int max_tokens,
                         int threads)
    : experts_(experts_of_layer),
      per_token_(per_token),
      normalise_(normalise),
      stride_((static_cast<size_t>(experts_of_layer) + 15) / 16 * 16) {
  const size_t tokens = static_cast<size_t>(max_tokens), experts = static_cast<size_t>(experts_);
  logits_ = AlignedArray<float>(tokens * stride_);
  order_ = AlignedArray<uint64_t>(static_cast<size_t>(threads) * experts);
  choices_ = AlignedArray<Choice>(tokens * static_cast<size_t>(per_token_));
  next_.resize(experts);
  groups_.reserve(experts);
  slots_.reserve(choices_.size());
  places_.resize(choices_.size());
}

void ExpertTable::choose(int token, int thread) {
  const size_t experts = static_cast<size_t>(experts_), k = static_cast<size_t>(per_token_);
  float* odds = logits_.data() + static_cast<size_t>(token) * stride_;
  std::fill(odds + experts, odds + stride_, -std::numeric_limits<float>::infinity());
  softmax(odds, static_cast<int>(stride_));
  // Floats that are not negative are in order as integers, and so are NaNs of broken weights: an
  // order in any case. Below them the number, the lower the better.
  uint64_t* order = order_.data() + static_cast<size_t>(thread) * experts;
  for (uint32_t e = 0; e < experts; ++e) {
    order[e] = uint64_t{std::bit_cast<uint32_t>(odds[e])} << 32 | (UINT32_MAX - e);
  }
  std::partial_sort(order, order + k, order + experts, std::greater<>());
  Choice* choices = choices_.data() + static_cast<size_t>(token) * k;
  for (size_t i = 0; i < k; ++i) {
    const uint32_t expert = UINT32_MAX - static_cast<uint32_t>(order[i]);
    choices[i] = {static_cast<int>(expert), odds[expert]};
  }
  std::sort(choices, choices + k,
            [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
  if (!normalise_) return;
  float sum = 0.0f;
  for (size_t i = 0; i < k; ++i) sum += choices[i].weight;
  for (size_t i = 0; i < k; ++i) choices[i].weight /= sum;
}

void ExpertTable::group(int tokens) {
  const size_t k = static_cast<size_t>(per_token_), all = static_cast<size_t>(tokens) * k;
  std::fill(next_.begin(), next_.end(), 0);
  for (size_t i = 0; i < all; ++i) ++next_[static_cast<size_t>(choices_[i].expert)];
  groups_.clear();
  int first = 0;
  for (int e = 0; e < experts_; ++e) {
    int& next = next_[static_cast<size_t>(e)];
    const int count = next;
    next = first;
    if (count > 0) groups_.push_back({e, first, count});
    first += count;
  }
  slots_.resize(all);
  for (size_t i = 0; i < all; ++i) {
    const Choice& choice = choices_[i];
    places_[i] = next_[static_cast<size_t>(choice.expert)]++;
    slots_[static_cast<size_t>(places_[i])] = {static_cast<int>(i / k), choice.weight};
  }
}

size_t ExpertTable::bytes() const {
  return logits_.size() * sizeof(float) + order_.size() * sizeof(uint64_t) +
         choices_.size() * sizeof(Choice) + next_.size() * sizeof(int) +
         groups_.capacity() * sizeof(Group) + slots_.capacity() * sizeof(Slot) +
         places_.size() * sizeof(int);
}

}  // namespace baton::engine
