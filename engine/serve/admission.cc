// Estimates how long answers take, and how long clients wait, from what was measured.
#include "engine/serve/admission.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace baton::engine::serve {
namespace {

constexpr double kRemembered = 2;  // seconds of work that the rate is averaged over
constexpr double kNewRatio = 0.1;  // weight of one answer in bias and mean output
constexpr size_t kLeavers = 8;     // so many, within kLately, are no accident: at first
constexpr Time kLately = std::chrono::seconds(10);
constexpr Time kForgotten = std::chrono::seconds(30);  // a patience that refuses nobody
// The part of their patience after which clients are planned to be answered: it shrinks by a factor
// with each who leaves and grows by a step with each who is answered, so that few leave.
constexpr double kShrink = 0.93, kGrow = 0.001, kLeast = 0.25, kMost = 0.8;
constexpr double kProbing = 0.005;  // the plan grows by so much per second, to find patience grown

Time from_seconds(double value) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(value));
}

}  // namespace

size_t Admission::expected_output(size_t max_output) const {
  return std::min(max_output, static_cast<size_t>(std::lround(mean_output_)));
}

std::optional<Time> Admission::limit(bool stream, Time now) const {
  std::optional<Time> most;
  if (options_.max_wait > Time{0}) most = options_.max_wait;
  const Patience& patience = patience_[stream ? 1 : 0];
  if (patience.value.has_value() && now - patience.used < kForgotten) {
    const double grown = 1 + kProbing * seconds_of(now - patience.learned);
    const Time planned = from_seconds(seconds_of(*patience.value) * patience.planned * grown);
    most = most.has_value() ? std::min(*most, planned) : planned;
  }
  return most;
}

absl::StatusOr<Time> Admission::admit(const Backlog& backlog, const WorkAhead& work, Time now) {
  double at_rate = 0;
  if (rate() > 0) {
    const bool all = !work.stream || backlog.free_places <= backlog.arriving;
    const size_t ahead = backlog.prompt_tokens + (all ? backlog.output_tokens : 0);
    const size_t output = work.stream ? 1 : expected_output(work.max_output);
    const size_t own = work.prompt_tokens + work.choices * output;
    at_rate = static_cast<double>(ahead + own) / rate();
  }
  const double expected = at_rate * bias_;
  const auto refuse = [&](std::string_view why, double again) {
    ++refused_;
    absl::Status status = absl::ResourceExhaustedError(std::string(why));
    const long wait = std::clamp(std::lround(std::ceil(again)), 1L, 60L);
    status.SetPayload(kRetryAfter, absl::Cord(std::to_string(wait)));
    return status;
  };
  // Alone it could not be quicker, and refusing it for ever would help nobody.
  const bool idle = backlog.prompt_tokens + backlog.output_tokens == 0;
  // Nobody overtakes those who wait.
  const size_t places = backlog.waiting > 0 ? 0 : backlog.free_places;
  const size_t waiting = backlog.waiting + backlog.arriving - std::min(backlog.arriving, places);
  const bool waits = places < backlog.arriving + work.choices;
  if (!idle && waits && waiting >= options_.max_waiting) {
    return refuse(
        absl::StrFormat("the queue is full: %d requests wait, and %d may; try again later", waiting,
                        options_.max_waiting),
        expected / 2);
  }
  const std::optional<Time> most = limit(work.stream, now);
  if (!idle && most.has_value() && from_seconds(expected) > *most) {
    Patience& patience = patience_[work.stream ? 1 : 0];
    patience.used = now;
    return refuse(
        absl::StrFormat("this server is overloaded: an answer is expected after %.1f s, and is "
                        "wanted within %.1f s; try again later",
                        expected, seconds_of(*most)),
        expected - seconds_of(*most));
  }
  return from_seconds(at_rate);
}

void Admission::computed(size_t tokens, Time busy) {
  const double keep = std::exp(-seconds_of(busy) / kRemembered);
  tokens_ = tokens_ * keep + static_cast<double>(tokens);
  busy_ = busy_ * keep + seconds_of(busy);
}

void Admission::note_ratio(double ratio) {
  bias_ += kNewRatio * (std::clamp(ratio, 0.25, 4.0) - bias_);
}

void Admission::answered(bool stream, Time expected, Time actual, size_t output) {
  Patience& patience = patience_[stream ? 1 : 0];
  patience.planned = std::min(kMost, patience.planned + kGrow);
  mean_output_ += kNewRatio * (static_cast<double>(output) - mean_output_);
  if (expected > Time{0}) note_ratio(seconds_of(actual) / seconds_of(expected));
}

void Admission::left(bool stream, Time expected, Time waited, Time now) {
  // It would have taken longer yet.
  if (expected > Time{0} && seconds_of(waited) > seconds_of(expected) * bias_) {
    note_ratio(seconds_of(waited) / seconds_of(expected));
  }
  Patience& patience = patience_[stream ? 1 : 0];
  auto& leavers = patience.leavers;
  leavers.emplace_back(now, waited);
  while (leavers.size() > 4 * kLeavers || now - leavers.front().first > kLately) {
    leavers.pop_front();
  }
  const bool known = patience.value.has_value() && now - patience.used < kForgotten;
  if (known) patience.planned = std::max(kLeast, patience.planned * kShrink);
  if (leavers.size() < (known ? 2 : kLeavers)) return;
  std::vector<Time> waits;
  for (const auto& [when, wait] : leavers) waits.push_back(wait);
  const auto quarter = waits.begin() + static_cast<ptrdiff_t>(waits.size() / 4);
  std::nth_element(waits.begin(), quarter, waits.end());
  patience.value = *quarter;
  patience.learned = patience.used = now;
}

}  // namespace baton::engine::serve
