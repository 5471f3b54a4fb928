// Limits of waiting, from samples of it.
#include "engine/router/expected_wait.h"

#include <algorithm>

#include "transport/base/quantile.h"

namespace baton::engine::router {
namespace {

// Beyond it no client waits, and it can be counted in nanoseconds.
constexpr double kDay = 86400;

}  // namespace

void ExpectedWait::Samples::add(double value) {
  if (values_.size() < kKept) {
    values_.push_back(value);
  } else {
    values_[next_] = value;
  }
  next_ = (next_ + 1) % kKept;
  // Every token of every stream comes by here.
  if (values_.size() <= kEnough || next_ % kEnough == 0) usual_ = base::quantile(values_, part_);
}

void ExpectedWait::note_first_token(size_t work, Time took) {
  per_work_.add(seconds_of(took) / static_cast<double>(std::max<size_t>(work, 1)));
}

void ExpectedWait::note_gap(Time took) { gaps_.add(seconds_of(took)); }

void ExpectedWait::note_answer(Time took) { answers_.add(seconds_of(took)); }

Time ExpectedWait::limit(const Samples& samples, double scale, Time floor) {
  if (samples.size() < kEnough) return floor * kUnknown;
  const double seconds = std::min(kDay, samples.usual() * scale);
  return std::max(floor, std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds)));
}

Time ExpectedWait::first_token_limit(size_t work) const {
  return limit(per_work_, kStrange * static_cast<double>(std::max<size_t>(work, 1)), floor_);
}

Time ExpectedWait::gap_limit() const { return limit(gaps_, kStrange, floor_); }

Time ExpectedWait::ask_limit() const { return limit(gaps_, kStrange, ask_floor_); }

Time ExpectedWait::answer_limit() const { return limit(answers_, kStrangeAnswer, ask_floor_); }

}  // namespace baton::engine::router
