// Admission in virtual time: an engine's steps under overload, whatever the patience of clients.
#include "engine/serve/admission.h"

#include <list>

#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;

// An engine as a 1.8 M model's on two cores: 600 tokens of prompt take 70 ms.
struct Machine {
  size_t prompt = 600, output = 16;
  size_t places = 16, step_tokens = 512;
  double fixed = 0.002, per_token = 1 / 9000.;
  double disturbed = 0;  // how much a step's time varies, as a part of it
  size_t burst = 1;      // clients that come at once
  bool streams = false;  // they wait for the first token, and then to the end
};

struct Seen {
  size_t arrived = 0, refused = 0, answered = 0, left = 0;
  double seconds = 0;
};

Time from_seconds(double value) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(value));
}

// Clients of one engine who come at random and leave after `patience`, or who ask one request after
// the other. Steps are made as the scheduler makes them, and admission is told what EngineThread
// tells it: what is under way when a step begins, and what has come since.
class Crowd {
 public:
  Crowd(Admission& admission, const Machine& machine, unsigned seed)
      : admission_(admission), machine_(machine), dice_(seed) {}

  void refuse_nobody() { refuses_ = false; }

  // `clients`: of those who ask in turn; 0: at `rate`. What comes before `counted` is not.
  Seen run(double rate, double patience, double from, double until, double counted,
           size_t clients = 0) {
    Seen seen;
    std::exponential_distribution<double> apart(rate / static_cast<double>(machine_.burst));
    double next = from + apart(dice_);
    now_ = from;
    waiting_.clear();
    running_.clear();
    look();
    while (now_ < until) {
      while (clients > 0 && running_.size() + waiting_.size() < clients) arrive(now_);
      for (; clients == 0 && next <= now_; next += apart(dice_)) {
        for (size_t i = 0; i < machine_.burst; ++i) {
          const bool taken = arrive(next);
          if (next < counted) continue;
          ++seen.arrived;
          seen.refused += taken ? 0 : 1;
        }
      }
      leave(patience, counted, &seen);
      look();
      if (!step(counted, &seen)) now_ = std::max(now_, next);
    }
    seen.seconds = until - counted;
    return seen;
  }

 private:
  struct Request {
    double arrival = 0;
    size_t prompt = 0, made = 0;
  };

  void look() {
    seen_ = {.requests = running_.size() + waiting_.size(),
             .unbegun = unbegun(),
             .waiting = waiting_.size(),
             .places = machine_.places};
  }
  size_t unbegun() const {
    const auto is = [](const Request& one) { return one.made == 0; };
    return waiting_.size() +
           static_cast<size_t>(std::count_if(running_.begin(), running_.end(), is));
  }

  bool arrive(double at) {
    if (refuses_ && !admission_.admit(seen_, machine_.streams, 1, from_seconds(at)).ok()) {
      return false;
    }
    waiting_.push_back({at, machine_.prompt});
    ++seen_.arriving;
    return true;
  }

  void leave(double patience, double counted, Seen* seen) {
    for (std::list<Request>* list : {&running_, &waiting_}) {
      std::erase_if(*list, [&](const Request& one) {
        if (now_ - one.arrival < patience || (machine_.streams && one.made > 0)) return false;
        admission_.left(machine_.streams, from_seconds(patience), seen_.waiting,
                        from_seconds(now_));
        seen->left += one.arrival >= counted ? 1 : 0;
        return true;
      });
    }
  }

  bool step(double counted, Seen* seen) {
    size_t budget = machine_.step_tokens, tokens = 0;
    std::vector<std::pair<Request*, size_t>> chunks;
    const auto take = [&](Request& one) {
      const size_t chunk = one.prompt > 0 ? std::min(one.prompt, budget) : 1;
      budget -= chunk;
      tokens += chunk;
      chunks.emplace_back(&one, chunk);
    };
    for (Request& one : running_) {
      if (budget > 0) take(one);
    }
    while (budget > 0 && !waiting_.empty() && running_.size() < machine_.places) {
      running_.splice(running_.end(), waiting_, waiting_.begin());
      take(running_.back());
    }
    if (chunks.empty()) return false;
    double noise = 1;
    if (machine_.disturbed > 0) {
      std::normal_distribution<double> disturbed(1, machine_.disturbed);
      noise = std::max(0.3, disturbed(dice_));
    }
    const double took = (machine_.fixed + machine_.per_token * static_cast<double>(tokens)) * noise;
    now_ += took;
    const size_t fresh = unbegun();
    for (const auto& [one, chunk] : chunks) {
      if (one->prompt > 0) one->prompt -= chunk;
      if (one->prompt == 0) ++one->made;
    }
    admission_.computed(fresh, fresh - unbegun(), from_seconds(took));
    std::erase_if(running_, [&](const Request& one) {
      if (one.made < machine_.output) return false;
      admission_.answered(machine_.streams);
      seen->answered += now_ >= counted ? 1 : 0;
      return true;
    });
    return true;
  }

  Admission& admission_;
  const Machine machine_;
  std::mt19937 dice_;
  bool refuses_ = true;
  double now_ = 0;
  std::list<Request> running_, waiting_;
  Backlog seen_;  // by whoever admits
};

// Answers per second to clients who ask one request after the other: as many as there are places,
// or fewer where those would not all be answered within `patience`.
double capacity_of(const Machine& machine, double patience = 1e9) {
  for (size_t clients = machine.places;; --clients) {
    Admission admission({});
    Crowd crowd(admission, machine, 1);
    crowd.refuse_nobody();
    const Seen seen = crowd.run(1, patience, 0, 30, 2, clients);
    if (seen.left == 0) return static_cast<double>(seen.answered) / seen.seconds;
  }
}

struct Overload {
  Machine machine;
  double patience;
};

std::vector<Overload> overloads() {
  std::vector<Overload> all;
  for (const double patience : {1., 2., 4.}) {
    for (const size_t output : {16, 64}) {
      for (const double disturbed : {0., 0.2}) {
        for (const bool streams : {false, true}) {
          all.push_back({{.output = output, .disturbed = disturbed, .streams = streams}, patience});
        }
      }
    }
  }
  return all;
}

testing::Message name_of(const Overload& one, unsigned seed) {
  return testing::Message() << one.patience << " s, " << one.machine.output << " tokens, disturbed "
                            << one.machine.disturbed << ", bursts of " << one.machine.burst
                            << (one.machine.streams ? ", streams" : "") << ", seed " << seed;
}

constexpr unsigned kSeeds = kSanitized ? 1 : 3;

// At `rate`; `in_time`: answers per second that an engine could give so that none is late.
void expect_goodput(const Overload& one, double rate, double in_time, double counted,
                    double least) {
  for (unsigned seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(name_of(one, seed));
    Admission admission({});
    Crowd crowd(admission, one.machine, seed);
    const Seen seen = crowd.run(rate, one.patience, 0, 60, counted);
    EXPECT_GE(static_cast<double>(seen.answered), least * in_time * seen.seconds);
    // Nearly all requests that were admitted are answered in time.
    EXPECT_LE(seen.left * 25, seen.answered);
  }
}

// Promise(serving): Under overload, time goes to requests that are answered | admission by measured
//   speed and observed waiting
TEST(Admission, GoodputHoldsAtFiveTimesTheCapacity) {
  for (const Overload& one : overloads()) {
    const double capacity = capacity_of(one.machine);
    // With 64 tokens of output and a full batch no answer takes less than 1.3 s.
    const double in_time = std::min(capacity, capacity_of(one.machine, one.patience));
    // Until clients have left once, their patience is unknown.
    expect_goodput(one, 5 * capacity, in_time, 2 * one.patience, 0.88);
  }
}

// Where many come at once, what is left of the time between them is lost, and more of it where
// clients wait for less than the next comes.
TEST(Admission, GoodputHoldsInBursts) {
  struct Row {
    size_t burst;
    double patience, least;
  };
  for (const Row& row : {Row{8, 1, 0.8}, Row{8, 4, 0.92}, Row{40, 4, 0.88}}) {
    const Overload one{{.burst = row.burst}, row.patience};
    const double in_time = capacity_of(one.machine, one.patience);
    expect_goodput(one, 5 * in_time, in_time, 10, row.least);
  }
}

// What overload has taught refuses few at four fifths of the capacity that would not be late.
TEST(Admission, AfterAnOverloadHardlyOthersThanLateRequestsAreRefused) {
  for (const Overload& one : overloads()) {
    const double capacity = capacity_of(one.machine);
    for (unsigned seed = 1; seed <= kSeeds; ++seed) {
      SCOPED_TRACE(name_of(one, seed));
      Admission admission({});
      Crowd crowd(admission, one.machine, seed);
      crowd.run(5 * capacity, one.patience, 0, 60, 0);
      const Seen after = crowd.run(0.79 * capacity, one.patience, 62, 92, 64);
      Admission unused({});
      Crowd taken(unused, one.machine, seed);
      taken.refuse_nobody();
      const Seen late = taken.run(0.79 * capacity, one.patience, 62, 92, 64);
      const auto part = [](size_t some, const Seen& seen) {
        return static_cast<double>(some) / static_cast<double>(seen.arrived);
      };
      EXPECT_LE(part(after.refused + after.left, after), part(late.left, late) + 0.15);
    }
  }
}

TEST(Admission, NoRefusalBelowCapacity) {
  for (const double patience : {2., 4.}) {
    for (unsigned seed = 1; seed <= kSeeds; ++seed) {
      const Machine machine;
      Admission admission({});
      const Seen seen =
          Crowd(admission, machine, seed).run(0.79 * capacity_of(machine), patience, 0, 60, 0);
      EXPECT_EQ(seen.refused, 0u);
      EXPECT_GT(seen.arrived, 500u);
    }
  }
}

// They leave late enough for it to be learned anew.
TEST(Admission, PatienceThatGrewIsFound) {
  const Machine machine;
  const double rate = 5 * capacity_of(machine);
  Admission admission({});
  Crowd crowd(admission, machine, 1);
  crowd.run(rate, 1.5, 0, 30, 0);
  const Time before = *admission.limit(false, 30s);
  EXPECT_LT(before, 1500ms);
  EXPECT_FALSE(admission.limit(true, 30s).has_value());  // streams have clients of their own
  crowd.run(rate, 20, 31, 120, 31);
  EXPECT_GT(*admission.limit(false, 120s), before);
  EXPECT_FALSE(admission.limit(false, 300s).has_value());  // nobody was refused for long
}

// One after the other, each in a tenth of a second.
void teach(Admission& admission, bool stream) {
  for (int i = 0; i < 100; ++i) {
    admission.computed(1, 1, 100ms);
    admission.answered(stream);
  }
}

// Eight clients hang up after 20 ms each.
void hang_up(Admission& admission, bool stream, size_t waiting, Time now) {
  for (int i = 0; i < 8; ++i) admission.left(stream, 20ms, waiting, now);
}

TEST(Admission, WhatWasSeenIsForgotten) {
  Admission admission({});
  teach(admission, false);
  const Backlog one_ahead{.requests = 1, .unbegun = 1};
  hang_up(admission, false, 0, 0s);  // without a queue
  EXPECT_FALSE(admission.limit(false, 0s).has_value());
  hang_up(admission, false, 1, 0s);
  EXPECT_LT(*admission.limit(false, 9s), 20ms);
  // What is refused without a queue shows no overload.
  EXPECT_FALSE(admission.admit(one_ahead, false, 1, 9s).ok());
  EXPECT_TRUE(admission.admit(one_ahead, false, 1, 10s).ok());
  hang_up(admission, false, 1, 10s);
  EXPECT_FALSE(admission.admit({.requests = 2, .waiting = 1}, false, 1, 19s).ok());
  EXPECT_FALSE(admission.admit(one_ahead, false, 1, 20s).ok());
}

TEST(Admission, LimitsAreTheOperators) {
  for (const bool stream : {false, true}) {
    Admission admission({.max_waiting = 30, .max_wait = 2s});
    const auto admit = [&](const Backlog& backlog, size_t choices = 1) {
      return admission.admit(backlog, stream, choices, 0s);
    };
    EXPECT_TRUE(admit({.requests = 29, .unbegun = 29, .waiting = 29}).ok());
    const absl::Status full = admit({.requests = 30, .unbegun = 30, .waiting = 30});
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(full.GetPayload(Admission::kRetryAfter).has_value());
    teach(admission, stream);
    hang_up(admission, stream, 1, 0s);  // what is seen changes nothing
    EXPECT_TRUE(admit({.requests = 18, .unbegun = 18}).ok());
    EXPECT_TRUE(admit({.requests = 10, .unbegun = 10, .arriving = 8}).ok());
    const absl::Status late = admit({.requests = 25, .unbegun = 25});
    EXPECT_EQ(late.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_NE(late.message().find("2.6 s, longer than the limit of 2.0 s"), absl::string_view::npos)
        << late;
    EXPECT_FALSE(admit({.requests = 10, .unbegun = 10}, 15).ok());  // each choice is one
    // A stream's client waits for its first token only.
    EXPECT_EQ(admit({.requests = 25, .unbegun = 1}).ok(), stream);
    EXPECT_EQ(admit({.requests = 25}, 25).ok(), stream);  // none is ahead of it
    // Alone, nothing is too much.
    EXPECT_TRUE(admit({}, 1000).ok());
    EXPECT_EQ(admission.refused(), stream ? 3u : 5u);
  }
}

TEST(Admission, WhereNoneMayWaitAPlaceInTheBatchIsTaken) {
  Admission admission({.max_waiting = 0});
  const auto taken = [&](const Backlog& backlog, size_t choices) {
    return admission.admit(backlog, false, choices, 0s).ok();
  };
  // Of an idle server it is all the batch.
  EXPECT_TRUE(taken({.places = 3}, 1));
  EXPECT_TRUE(taken({.places = 3}, 4));
  EXPECT_TRUE(taken({.requests = 1, .places = 4}, 1));
  EXPECT_FALSE(taken({.requests = 1, .places = 4}, 4));
  // Of those that the next step will take, three have a place.
  EXPECT_TRUE(taken({.requests = 1, .arriving = 2, .places = 4}, 1));
  EXPECT_FALSE(taken({.requests = 1, .arriving = 3, .places = 4}, 1));
  // For want of memory a request may wait beside free places.
  EXPECT_FALSE(taken({.requests = 2, .waiting = 1, .places = 4}, 1));
  EXPECT_EQ(admission.admit({.requests = 1, .places = 1}, false, 1, 0s).message(),
            "the queue is full: 0 of at most 0 requests are waiting; try again later");
}

}  // namespace
}  // namespace baton::engine::serve
