// Estimates when answers will come, and how long clients wait, from what was measured.
#include "engine/serve/admission.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace baton::engine::serve {
namespace {

constexpr double kRemembered = 64;  // requests that a rate is averaged over
constexpr size_t kLeavers = 8;      // so many, within kLately, are no accident: at first
// A patience is forgotten after as long in which it was not learnt again and refused no request
// that had a queue before it.
constexpr Time kLately = std::chrono::seconds(10);
// The part of their patience after which clients are planned to be answered. It shrinks by a factor
// when one leaves who was taken since it last did, since those before know nothing of that, and
// grows by a step with each answered client: so that few leave, whatever disturbs the forecasts.
constexpr double kShrink = 0.93, kGrow = 0.0001, kLeast = 0.25, kMost = 0.97;
constexpr double kProbing = 0.001;  // the plan grows by so much per second, to find patience grown

Time from_seconds(double value) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(value));
}

}  // namespace

void Admission::Served::add(double more) {
  const double keep = std::exp(-more / kRemembered);
  requests = requests * keep + more;
  seconds *= keep;
}

bool Admission::knows(const Patience& patience, Time now) const {
  return patience.value.has_value() && now - patience.used < kLately;
}

std::optional<Time> Admission::limit(bool stream, Time now) const {
  if (options_.max_wait > Time{0}) return options_.max_wait;
  const Patience& patience = patience_[stream ? 1 : 0];
  if (!knows(patience, now)) return std::nullopt;
  const double grown = 1 + kProbing * seconds_of(now - patience.learned);
  return from_seconds(seconds_of(*patience.value) * patience.planned * grown);
}

absl::Status Admission::refuse(std::string_view why, double again) {
  ++refused_;
  absl::Status status = absl::ResourceExhaustedError(std::string(why));
  const long wait = std::clamp(std::lround(std::ceil(again)), 1L, 60L);
  status.SetPayload(kRetryAfter, absl::Cord(std::to_string(wait)));
  return status;
}

absl::Status Admission::admit(const Backlog& backlog, bool stream, size_t choices, Time now) {
  // Alone it could not be quicker, and refusing it for ever would not help.
  if (backlog.requests + backlog.arriving == 0) return absl::OkStatus();
  // No request overtakes those who wait.
  const size_t free =
      backlog.waiting > 0 ? 0 : backlog.places - std::min(backlog.places, backlog.requests);
  const size_t waiting = backlog.waiting + backlog.arriving - std::min(backlog.arriving, free);
  const double rate = (stream ? first_tokens_ : answers_).rate();
  if (free < backlog.arriving + choices && waiting >= options_.max_waiting) {
    return refuse(
        absl::StrFormat("the queue is full: %d of at most %d requests are waiting; try again later",
                        waiting, options_.max_waiting),
        rate > 0 ? static_cast<double>(waiting) / rate / 2 : 0);
  }
  const std::optional<Time> most = limit(stream, now);
  const size_t ahead = (stream ? backlog.unbegun : backlog.requests) + backlog.arriving;
  if (rate == 0 || ahead == 0 || !most.has_value()) return absl::OkStatus();
  const double expected = static_cast<double>(ahead + choices) / rate;
  if (from_seconds(expected) <= *most) return absl::OkStatus();
  for (Patience& patience : patience_) {
    if (waiting > 0 && knows(patience, now)) patience.used = now;
  }
  return refuse(absl::StrFormat("this server is overloaded: an answer would take %.1f s, longer "
                                "than the limit of %.1f s; try again later",
                                expected, seconds_of(*most)),
                expected - seconds_of(*most));
}

void Admission::computed(size_t unbegun, size_t begun, Time busy) {
  answers_.seconds += seconds_of(busy);
  if (unbegun == 0) return;
  first_tokens_.seconds += seconds_of(busy);
  first_tokens_.add(static_cast<double>(begun));
}

void Admission::answered(bool stream) {
  answers_.add(1);
  Patience& patience = patience_[stream ? 1 : 0];
  patience.planned = std::min(kMost, patience.planned + kGrow);
}

void Admission::left(bool stream, Time waited, size_t waiting, Time now) {
  if (waiting == 0) return;
  Patience& patience = patience_[stream ? 1 : 0];
  auto& leavers = patience.leavers;
  leavers.emplace_back(now, waited);
  while (leavers.size() > 4 * kLeavers || now - leavers.front().first > kLately) {
    leavers.pop_front();
  }
  const bool known = knows(patience, now);
  if (known && now - waited >= patience.shrunk) {
    patience.planned = std::max(kLeast, patience.planned * kShrink);
    patience.shrunk = now;
  }
  if (leavers.size() < (known ? 2 : kLeavers)) return;
  std::vector<Time> waits;
  for (const auto& [when, wait] : leavers) waits.push_back(wait);
  const auto quarter = waits.begin() + static_cast<ptrdiff_t>(waits.size() / 4);
  std::nth_element(waits.begin(), quarter, waits.end());
  patience.value = *quarter;
  patience.learned = patience.used = now;
  if (!known) patience.shrunk = now;  // those that were taken before did not know of it
}

}  // namespace baton::engine::serve
