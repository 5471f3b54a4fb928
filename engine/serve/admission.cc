// Estimates when answers will come, and how long clients wait, from what was measured.
#include "engine/serve/admission.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"

namespace baton::engine::serve {
namespace {

constexpr double kRemembered = 2;       // seconds of work that the rate is averaged over
constexpr double kStepsRemembered = 5;  // ... and what a step costs
constexpr double kEnough = 8, kFar = 4, kAlike = 0.01;
constexpr double kNewAnswer = 0.1;  // weight of one answer in mean output and computed part
constexpr size_t kLeavers = 8;      // so many, within kLately, are no accident: at first
constexpr Time kLately = std::chrono::seconds(10);
constexpr Time kForgotten = std::chrono::seconds(30);  // a patience that refuses no request
// The part of their patience after which clients are planned to be answered. It shrinks by a factor
// when one leaves who was taken since it last did, since those before know nothing of that, and
// grows by a step with each answered client: so that few leave, whatever disturbs the forecasts.
constexpr double kShrink = 0.93, kGrow = 0.0001, kLeast = 0.25, kMost = 0.97;
constexpr size_t kMostFollowers = 32;
constexpr double kFollowed = 0.6;   // the part of the plan in which one with followers is answered
constexpr double kProbing = 0.001;  // the plan grows by so much per second, to find patience grown

Time from_seconds(double value) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(value));
}

}  // namespace

size_t Admission::expected_output(size_t max_output) const {
  return std::min(max_output, static_cast<size_t>(std::lround(mean_output_)));
}

bool Admission::knows(const Patience& patience, Time now) const {
  return patience.value.has_value() && now - patience.used < kForgotten;
}

std::optional<Time> Admission::longest(bool stream, Time now, double part) const {
  std::optional<Time> most;
  if (options_.max_wait > Time{0}) most = options_.max_wait;
  const Patience& patience = patience_[stream ? 1 : 0];
  if (knows(patience, now)) {
    const double grown = 1 + kProbing * seconds_of(now - patience.learned);
    const Time waits = from_seconds(seconds_of(*patience.value) * part * grown);
    most = most.has_value() ? std::min(*most, waits) : waits;
  }
  return most;
}

std::optional<Time> Admission::limit(bool stream, Time now) const {
  return longest(stream, now, patience_[stream ? 1 : 0].planned);
}

StepCost Admission::cost() const {
  const double mean_x = steps_.x / steps_.n, mean_y = steps_.y / steps_.n;
  const double spread = steps_.xx / steps_.n - mean_x * mean_x;
  // Steps of one size do not tell the fixed cost from the cost per token.
  const double slope = spread > kAlike * mean_x * mean_x
                           ? (steps_.xy / steps_.n - mean_x * mean_y) / spread
                           : mean_y / mean_x;
  const double per_token = std::clamp(slope, 0.0, mean_y / mean_x);
  return {.fixed = mean_y - per_token * mean_x, .per_token = per_token};
}

std::vector<Pending> Admission::fresh_queue(const Backlog& backlog) const {
  std::vector<Pending> queue = backlog.queue;
  for (Pending& one : queue) {
    if (one.begun) continue;
    const double tokens = computed_part_ * static_cast<double>(one.prompt);
    one.prompt = std::max<size_t>(static_cast<size_t>(tokens), 1);
  }
  return queue;
}

size_t Admission::followers_of(const Pending& choice, size_t choices, const StepSizes& sizes,
                               Time limit) const {
  const auto others =
      static_cast<size_t>(std::llround(std::max(arrived_ - static_cast<double>(choices), 0.0)));
  size_t count = std::min({std::max<size_t>(sizes.places, 1) - 1, kMostFollowers, others});
  for (; count > 0; count -= std::max<size_t>(count / 4, 1)) {
    const std::vector<Pending> alike(choices + count, choice);
    const double ends = forecast({}, alike, sizes, cost())[choices - 1];
    if (ends <= kFollowed * seconds_of(limit)) break;
  }
  return count;
}

Admission::Outlook Admission::look_ahead(const Backlog& backlog, const WorkAhead& work,
                                         Time now) const {
  std::vector<Pending> queue = fresh_queue(backlog);
  const std::vector<double> before = forecast(backlog.batch, queue, backlog.sizes, cost());
  const double prompt = computed_part_ * static_cast<double>(work.prompt_tokens) /
                        static_cast<double>(std::max<size_t>(work.choices, 1));
  const Pending choice{.arrival = now,
                       .prompt = std::max<size_t>(static_cast<size_t>(prompt), 1),
                       .output = expected_output(work.max_output),
                       .stream = work.stream};
  queue.insert(queue.end(), work.choices, choice);
  const std::vector<double> after = forecast(backlog.batch, queue, backlog.sizes, cost());
  Outlook outlook;
  // Others come behind it and share its steps. Without them in mind it would be planned so tightly
  // that all of them are refused for its sake, and the engine runs empty until it has ended.
  if (const std::optional<Time> most = limit(work.stream, now); most.has_value()) {
    queue.insert(queue.end(),
                 followers_of(choice, std::max<size_t>(work.choices, 1), backlog.sizes, *most),
                 choice);
  }
  const std::vector<double> followed = forecast(backlog.batch, queue, backlog.sizes, cost());
  for (size_t i = 0; i < after.size(); ++i) {
    if (i >= before.size()) {
      outlook.expected = std::max(outlook.expected, followed[i]);
      continue;
    }
    const size_t in_batch = backlog.batch.size();
    const Pending& other = i < in_batch ? backlog.batch[i] : queue[i - in_batch];
    const std::optional<Time> planned = limit(other.stream, now), most = longest(other.stream, now);
    if (!planned.has_value() || after[i] <= before[i]) continue;
    // Nothing harms those that are too late in any case.
    const double waited = seconds_of(now - other.arrival);
    outlook.harms |=
        waited + after[i] > seconds_of(*planned) && waited + before[i] <= seconds_of(*most);
  }
  return outlook;
}

absl::Status Admission::refuse(std::string_view why, double again) {
  ++refused_;
  absl::Status status = absl::ResourceExhaustedError(std::string(why));
  const long wait = std::clamp(std::lround(std::ceil(again)), 1L, 60L);
  status.SetPayload(kRetryAfter, absl::Cord(std::to_string(wait)));
  return status;
}

absl::Status Admission::admit(const Backlog& backlog, const WorkAhead& work, Time now) {
  const double within = seconds_of(limit(work.stream, now).value_or(std::chrono::seconds(1)));
  arrived_ *= std::exp(-seconds_of(now - arrived_at_) / within);
  arrived_ += static_cast<double>(std::max<size_t>(work.choices, 1));
  arrived_at_ = now;
  // Alone it could not be quicker, and refusing it for ever would not help.
  if (backlog.prompt_tokens + backlog.output_tokens == 0) return absl::OkStatus();
  // No request overtakes those who wait.
  const size_t places = backlog.waiting > 0 ? 0 : backlog.free_places;
  const size_t waiting = backlog.waiting + backlog.arriving - std::min(backlog.arriving, places);
  const bool waits = places < backlog.arriving + work.choices;
  if (waits && waiting >= options_.max_waiting) {
    const double ahead = static_cast<double>(backlog.prompt_tokens + backlog.output_tokens);
    return refuse(
        absl::StrFormat("the queue is full: %d of at most %d requests are waiting; try again later",
                        waiting, options_.max_waiting),
        rate() > 0 ? ahead / rate() / 2 : 0);
  }
  if (steps_.n == 0 || !has_limit(now)) return absl::OkStatus();
  const Outlook outlook = look_ahead(backlog, work, now);
  const std::optional<Time> most = limit(work.stream, now);
  const bool late = most.has_value() && from_seconds(outlook.expected) > *most;
  if (!late && !outlook.harms) return absl::OkStatus();
  for (Patience& patience : patience_) {
    if (knows(patience, now)) patience.used = now;
  }
  if (!late) {
    return refuse(
        "this server is overloaded: this request would delay others whose answers are due; try "
        "again later",
        1);
  }
  return refuse(absl::StrFormat("this server is overloaded: an answer would take %.1f s, longer "
                                "than the limit of %.1f s; try again later",
                                outlook.expected, seconds_of(*most)),
                outlook.expected - seconds_of(*most));
}

std::vector<uint64_t> Admission::too_late(const Backlog& backlog, Time now) {
  std::vector<uint64_t> ids;
  if (steps_.n == 0 || backlog.queue.empty() || !has_limit(now)) return ids;
  std::vector<Pending> batch = backlog.batch;
  for (const Pending& one : fresh_queue(backlog)) {
    if (batch.size() >= backlog.sizes.places) break;  // its turn has not come
    const std::optional<Time> most = longest(one.stream, now);
    batch.push_back(one);
    if (!most.has_value() || one.begun) continue;
    const double ends = forecast(batch, {}, backlog.sizes, cost()).back();
    if (now - one.arrival + from_seconds(ends) <= *most) continue;
    batch.pop_back();
    ids.push_back(one.id);
    ++refused_;
  }
  return ids;
}

void Admission::computed(size_t tokens, size_t computed, Time busy) {
  const double keep = std::exp(-seconds_of(busy) / kRemembered);
  tokens_ = tokens_ * keep + static_cast<double>(tokens);
  busy_ = busy_ * keep + seconds_of(busy);
  if (computed == 0 || busy <= Time{0}) return;
  // A moment in which the machine did something else is no news of what steps cost.
  const double x = static_cast<double>(computed);
  const double y = steps_.n < kEnough ? seconds_of(busy)
                                      : std::min(seconds_of(busy), kFar * cost().of(computed));
  const double kept = std::exp(-y / kStepsRemembered);
  for (double* sum : {&steps_.n, &steps_.x, &steps_.y, &steps_.xx, &steps_.xy}) *sum *= kept;
  steps_.n += 1;
  steps_.x += x;
  steps_.y += y;
  steps_.xx += x * x;
  steps_.xy += x * y;
}

void Admission::answered(bool stream, size_t output, double part) {
  Patience& patience = patience_[stream ? 1 : 0];
  patience.planned = std::min(kMost, patience.planned + kGrow);
  mean_output_ += kNewAnswer * (static_cast<double>(output) - mean_output_);
  computed_part_ += kNewAnswer * (std::clamp(part, 0.0, 1.0) - computed_part_);
}

void Admission::left(bool stream, Time waited, Time now) {
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
