// What computing, asking and loading cost, and their comparison.
#include "engine/serve/cache/load_choice.h"

#include <algorithm>
#include <chrono>

#include "engine/kernels/kv_cache.h"

namespace baton::engine::serve {
namespace {

constexpr size_t kFewestTokens = 16;  // of a step that says what a token costs

double positive(Time took) { return std::max(seconds_of(took), 1e-9); }

}  // namespace

void LoadChoice::computed(size_t first, size_t tokens, Time took) {
  // Steps of few tokens show what a step costs that computes next to nothing; one of them is enough
  // for each step of a prompt, since there are many more of them.
  const bool few = tokens < kFewestTokens;
  if (few && !prompt_was_last_) return;
  prompt_was_last_ = !few;
  const auto n = static_cast<double>(tokens);
  compute_.add(tokens, {n, n * (static_cast<double>(first) + n / 2), 1}, positive(took));
}

void LoadChoice::loaded(size_t blocks, LoadPlace place, Time took) {
  loads_[static_cast<size_t>(place)].add(blocks, {1, static_cast<double>(blocks)}, positive(took));
}

void LoadChoice::asked(size_t blocks, Time took) {
  ask_.add(blocks, {1, static_cast<double>(blocks)}, positive(took));
}

double LoadChoice::compute_seconds(size_t first, size_t tokens) const {
  const auto n = static_cast<double>(tokens);
  return compute_.at({n, n * (static_cast<double>(first) + n / 2), 0});
}

double LoadChoice::load_seconds(size_t blocks, LoadPlace place) const {
  return load(place).at({1, static_cast<double>(blocks)});
}

double LoadChoice::ask_seconds(size_t blocks) const {
  return ask_.at({1, static_cast<double>(blocks)});
}

// False: it is tried all the same.
bool LoadChoice::refuse(uint32_t* refused) {
  if (++*refused < kTryAgain) return true;
  *refused = 0;
  return false;
}

bool LoadChoice::load_is_quicker(size_t first, size_t tokens, size_t blocks, LoadPlace place) {
  const bool known = compute_.points() > 0 && load(place).points() >= kFewest;
  if (!known || load_seconds(blocks, place) <= compute_seconds(first, tokens)) {
    return true;
  }
  return !refuse(&loads_refused_[static_cast<size_t>(place)]);
}

bool LoadChoice::is_worth_asking(const Wanted& wanted, LoadPlace place) {
  if (compute_.points() == 0 || ask_.points() < kFewest || load(place).points() < kFewest) {
    return true;
  }
  double without = compute_seconds(wanted.first, wanted.blocks * kBlockTokens);
  if (wanted.near > 0 && load(wanted.near_place).points() >= kFewest) {
    without = std::min(without, load_seconds(wanted.near, wanted.near_place) +
                                    compute_seconds(wanted.first + wanted.near * kBlockTokens,
                                                    (wanted.blocks - wanted.near) * kBlockTokens));
  }
  if (ask_seconds(wanted.blocks) + load_seconds(wanted.blocks, place) <= without) {
    return true;
  }
  return !refuse(&questions_refused_);
}

}  // namespace baton::engine::serve
