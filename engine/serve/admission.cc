// Estimates when answers will come, from what was measured.
#include "engine/serve/admission.h"

#include <cmath>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace baton::engine::serve {
namespace {

constexpr double kRemembered = 64;  // requests that a rate is averaged over

}  // namespace

void Admission::Served::add(double more) {
  const double keep = std::exp(-more / kRemembered);
  requests = requests * keep + more;
  seconds *= keep;
}

absl::Status Admission::refuse(std::string_view why, double again) {
  ++refused_;
  absl::Status status = absl::ResourceExhaustedError(std::string(why));
  const long wait = std::clamp(std::lround(std::ceil(again)), 1L, 60L);
  status.SetPayload(kRetryAfter, absl::Cord(std::to_string(wait)));
  return status;
}

absl::Status Admission::admit(const Backlog& backlog, bool stream, size_t choices) {
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
  const double most = seconds_of(options_.max_wait);
  if (rate == 0 || most == 0) return absl::OkStatus();
  const size_t ahead = (stream ? backlog.unbegun : backlog.requests) + backlog.arriving;
  const double expected = static_cast<double>(ahead + choices) / rate;
  if (expected <= most) return absl::OkStatus();
  return refuse(absl::StrFormat("this server is overloaded: an answer would take %.1f s, longer "
                                "than the limit of %.1f s; try again later",
                                expected, most),
                expected - most);
}

void Admission::computed(size_t unbegun, size_t begun, Time busy) {
  answers_.seconds += seconds_of(busy);
  if (unbegun == 0) return;
  first_tokens_.seconds += seconds_of(busy);
  first_tokens_.add(static_cast<double>(begun));
}

}  // namespace baton::engine::serve
