// Admission in virtual time: goodput under overload, whatever the patience of clients.
#include "engine/serve/admission.h"

#include <gtest/gtest.h>

#include <deque>
#include <optional>

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

constexpr size_t kPrompt = 600;
constexpr size_t kOutput = 16;
constexpr Time kService = 300ms;  // of one request, alone: first come, first served

struct Load {
  Time apart;     // arrivals
  Time patience;  // of every client
  Time from{}, until{};
  Time counted_from{};
};

struct Seen {
  size_t arrived = 0, refused = 0, answered = 0, left = 0;
  Time wasted{};  // work for clients who had left
};

// One server, first come, first served, and clients who leave.
Seen simulate(Admission& admission, const Load& load) {
  struct Job {
    Time arrival, expected, done{};
  };
  std::deque<Job> queue;
  Seen seen;
  Time now = load.from, next = load.from;
  Time busy_since{};
  while (now < load.until || !queue.empty()) {
    // Whatever comes first: an arrival, the end of a job, the end of somebody's patience.
    std::optional<Time> event;
    const auto consider = [&](Time time) { event = std::min(event.value_or(time), time); };
    if (next < load.until) consider(next);
    if (!queue.empty()) consider(busy_since + kService - queue.front().done);
    for (const Job& job : queue) consider(job.arrival + load.patience);
    if (!event.has_value()) break;
    now = std::max(now, *event);
    if (!queue.empty()) {
      Job& job = queue.front();
      const Time worked = now - busy_since;
      job.done += worked;
      busy_since = now;
      if (worked > Time{0}) {
        admission.computed(static_cast<size_t>((kPrompt + kOutput) *
                                               (static_cast<double>(worked.count()) /
                                                static_cast<double>(Time(kService).count()))),
                           worked);
      }
      if (job.done >= kService) {
        admission.answered(false, job.expected, now - job.arrival, kOutput);
        seen.answered += now >= load.counted_from ? 1 : 0;
        queue.pop_front();
      }
    }
    for (auto job = queue.begin(); job != queue.end();) {
      if (now - job->arrival < load.patience) {
        ++job;
        continue;
      }
      admission.left(false, job->expected, now - job->arrival, now);
      ++seen.left;
      if (now >= load.counted_from) seen.wasted += job->done;
      job = queue.erase(job);
    }
    if (now >= next && next < load.until) {
      next += load.apart;
      ++seen.arrived;
      Backlog backlog;
      backlog.waiting = queue.empty() ? 0 : queue.size() - 1;
      backlog.free_places = 0;
      for (const Job& job : queue) {
        const double left =
            1 - static_cast<double>(job.done.count()) / static_cast<double>(Time(kService).count());
        backlog.prompt_tokens += static_cast<size_t>(kPrompt * left);
        backlog.output_tokens += admission.expected_output(kOutput);
      }
      const auto expected = admission.admit(backlog, {kPrompt, kOutput, false}, now);
      if (expected.ok()) {
        if (queue.empty()) busy_since = now;
        queue.push_back({now, *expected});
      } else {
        ++seen.refused;
      }
    }
  }
  return seen;
}

TEST(Admission, GoodputHoldsAtFiveTimesTheCapacity) {
  for (const Time patience : {Time(700ms), Time(1s), Time(3s), Time(6s)}) {
    Admission admission({});
    const Time length = 120s;
    // Until clients have left once, nobody knows how long they wait.
    const Time begin = 3 * patience;
    const Seen seen = simulate(admission, {kService / 5, patience, 0s, begin + length, begin});
    const double capacity = static_cast<double>(length / kService);
    EXPECT_GE(static_cast<double>(seen.answered), 0.9 * capacity) << patience.count();
    EXPECT_LT(seen.wasted, length / 20) << patience.count();
  }
}

TEST(Admission, NobodyIsRefusedBelowTheCapacity) {
  Admission admission({});
  const Seen seen = simulate(admission, {kService * 3 / 2, 1s, 0s, 120s});
  EXPECT_EQ(seen.refused, 0u);
  EXPECT_EQ(seen.answered, seen.arrived);
}

TEST(Admission, NormalLoadIsServedRightAfterAnOverload) {
  Admission admission({});
  simulate(admission, {kService / 5, 1s, 0s, 60s});
  const Seen after = simulate(admission, {kService * 3 / 2, 1s, 62s, 122s});
  EXPECT_EQ(after.refused, 0u);
  EXPECT_EQ(after.answered, after.arrived);
}

TEST(Admission, PatienceThatGrewIsFound) {
  Admission admission({});
  simulate(admission, {kService / 5, 700ms, 0s, 30s});
  const Time before = *admission.limit(false, 30s);
  EXPECT_LT(before, 800ms);
  EXPECT_FALSE(admission.limit(true, 30s).has_value());  // streams have clients of their own
  simulate(admission, {kService / 5, 20s, 31s, 120s});
  EXPECT_GT(*admission.limit(false, 120s), before);
  EXPECT_FALSE(admission.limit(false, 300s).has_value());  // nobody was refused for long
}

TEST(Admission, LimitsAreTheOperators) {
  Admission admission({.max_waiting = 3, .max_wait = 2s});
  const WorkAhead work{kPrompt, kOutput, false};
  EXPECT_TRUE(admission.admit({.waiting = 2, .prompt_tokens = 1}, work, 0s).ok());
  const absl::Status full = admission.admit({.waiting = 3, .prompt_tokens = 1}, work, 0s).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(full.GetPayload(Admission::kRetryAfter).has_value());
  admission.computed(1000, 1s);
  EXPECT_TRUE(admission.admit({.prompt_tokens = 1000}, work, 0s).ok());
  EXPECT_FALSE(admission.admit({.prompt_tokens = 2000}, work, 0s).ok());
  // A stream's client waits for its first token only.
  const Backlog others{.output_tokens = 5000};
  EXPECT_TRUE(admission.admit(others, {kPrompt, kOutput, true}, 0s).ok());
  EXPECT_FALSE(admission.admit(others, work, 0s).ok());
  // Alone, nothing is too much.
  EXPECT_TRUE(admission.admit({}, {100000, 1, false}, 0s).ok());
  EXPECT_EQ(admission.refused(), 3u);
}

TEST(Admission, EveryChoiceHasItsOwnOutput) {
  Admission admission({.max_wait = 2s});
  admission.computed(1000, 1s);
  const Backlog others{.prompt_tokens = 1};
  // Of 64 tokens that are usual: 100 and 29 times 64 are below 2,000, and 30 times are not.
  EXPECT_TRUE(admission.admit(others, {100, 1000, false, 29}, 0s).ok());
  EXPECT_FALSE(admission.admit(others, {100, 1000, false, 30}, 0s).ok());
  // What a choice may have, if that is less.
  EXPECT_TRUE(admission.admit(others, {100, 10, false, 128}, 0s).ok());
  // Of a stream each choice's first token.
  EXPECT_TRUE(admission.admit(others, {1899, 1000, true, 100}, 0s).ok());
  EXPECT_FALSE(admission.admit(others, {1901, 1000, true, 100}, 0s).ok());
}

TEST(Admission, WhereNoneMayWaitAPlaceInTheBatchIsTaken) {
  Admission admission({.max_waiting = 0});
  const WorkAhead work{kPrompt, kOutput, false};
  WorkAhead four = work;
  four.choices = 4;
  const auto taken = [&](const Backlog& backlog, const WorkAhead& one) {
    return admission.admit(backlog, one, 0s).ok();
  };
  // Of an idle server it is all the batch.
  EXPECT_TRUE(taken({.free_places = 3}, work));
  EXPECT_TRUE(taken({.free_places = 3}, four));
  EXPECT_TRUE(taken({.free_places = 3, .output_tokens = 9}, work));
  EXPECT_FALSE(taken({.free_places = 3, .output_tokens = 9}, four));
  // Of those that the next step will take, three have a place.
  EXPECT_TRUE(taken({.arriving = 2, .free_places = 3, .output_tokens = 9}, work));
  EXPECT_FALSE(taken({.arriving = 3, .free_places = 3, .output_tokens = 9}, work));
  // For want of memory a request may wait beside free places.
  EXPECT_FALSE(taken({.waiting = 1, .free_places = 3, .output_tokens = 9}, work));
  EXPECT_EQ(admission.admit({.free_places = 0, .output_tokens = 9}, work, 0s).status().message(),
            "the queue is full: 0 requests wait, and 0 may; try again later");
}

}  // namespace
}  // namespace baton::engine::serve
