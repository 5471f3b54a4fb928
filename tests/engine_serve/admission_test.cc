// Admission in virtual time: an engine's steps under overload, whatever the patience of clients.
#include "engine/serve/admission.h"

#include <list>

#include "engine/serve/requests/forecast.h"
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
      const auto late =
          refuses_ ? admission_.too_late(backlog(), from_seconds(now_)) : std::vector<uint64_t>();
      for (const uint64_t id : late) {
        std::erase_if(waiting_, [id](const Request& one) { return one.id == id; });
        seen.refused += now_ < counted ? 0 : 1;
      }
      look();
      if (!step(counted, &seen)) now_ = std::max(now_, next);
    }
    seen.seconds = until - counted;
    return seen;
  }

 private:
  struct Request {
    uint64_t id = 0;
    double arrival = 0;
    size_t prompt = 0, made = 0;
  };

  Backlog backlog() const {
    Backlog backlog;
    backlog.sizes = {machine_.places, machine_.step_tokens};
    backlog.waiting = waiting_.size();
    backlog.free_places =
        machine_.places - std::min(machine_.places, running_.size() + waiting_.size());
    for (const std::list<Request>* list : {&running_, &waiting_}) {
      for (const Request& one : *list) {
        const size_t usual = admission_.expected_output(machine_.output);
        const Pending pending{.id = one.id,
                              .arrival = from_seconds(one.arrival),
                              .prompt = one.prompt,
                              .output = usual > one.made ? usual - one.made : 1,
                              .begun = one.made > 0};
        backlog.prompt_tokens += std::max<size_t>(one.prompt, 1);
        backlog.output_tokens += pending.output;
        (list == &running_ ? backlog.batch : backlog.queue).push_back(pending);
      }
    }
    return backlog;
  }
  void look() { seen_ = backlog(); }

  bool arrive(double at) {
    const WorkAhead work{.prompt_tokens = machine_.prompt, .max_output = machine_.output};
    if (refuses_ && !admission_.admit(seen_, work, from_seconds(at)).ok()) return false;
    waiting_.push_back({++ids_, at, machine_.prompt});
    const size_t output = admission_.expected_output(machine_.output);
    seen_.queue.push_back(
        {.id = ids_, .arrival = from_seconds(at), .prompt = machine_.prompt, .output = output});
    ++seen_.arriving;
    seen_.prompt_tokens += machine_.prompt;
    seen_.output_tokens += output;
    return true;
  }

  void leave(double patience, double counted, Seen* seen) {
    for (std::list<Request>* list : {&running_, &waiting_}) {
      std::erase_if(*list, [&](const Request& one) {
        if (now_ - one.arrival < patience) return false;
        admission_.left(false, from_seconds(patience), from_seconds(now_));
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
    admission_.computed(tokens, from_seconds(took));
    for (const auto& [one, chunk] : chunks) {
      if (one->prompt > 0) one->prompt -= chunk;
      if (one->prompt == 0) ++one->made;
    }
    std::erase_if(running_, [&](const Request& one) {
      if (one.made < machine_.output) return false;
      admission_.answered(false, machine_.output);
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
  uint64_t ids_ = 0;
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
        all.push_back({{.output = output, .disturbed = disturbed}, patience});
      }
    }
  }
  return all;
}

testing::Message name_of(const Overload& one, unsigned seed) {
  return testing::Message() << one.patience << " s, " << one.machine.output << " tokens, disturbed "
                            << one.machine.disturbed << ", bursts of " << one.machine.burst
                            << ", seed " << seed;
}

constexpr unsigned kSeeds = kSanitized ? 1 : 3;

// Promise(serving): Under overload, time goes to requests that are answered | admission by measured
//   speed and observed waiting
TEST(Admission, GoodputHoldsAtFiveTimesTheCapacity) {
  for (const Overload& one : overloads()) {
    const double capacity = capacity_of(one.machine);
    // With 64 tokens of output and a full batch no answer takes less than 1.3 s.
    const double in_time = std::min(capacity, capacity_of(one.machine, one.patience));
    for (unsigned seed = 1; seed <= kSeeds; ++seed) {
      SCOPED_TRACE(name_of(one, seed));
      Admission admission({});
      Crowd crowd(admission, one.machine, seed);
      // Until clients have left once, their patience is unknown.
      const Seen seen = crowd.run(5 * capacity, one.patience, 0, 60, 2 * one.patience);
      EXPECT_GE(static_cast<double>(seen.answered), 0.95 * in_time * seen.seconds);
      // Nearly all requests that were admitted are answered in time.
      EXPECT_LE(seen.left * 50, seen.answered);
    }
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
    for (unsigned seed = 1; seed <= kSeeds; ++seed) {
      SCOPED_TRACE(name_of(one, seed));
      Admission admission({});
      Crowd crowd(admission, one.machine, seed);
      const Seen seen = crowd.run(5 * in_time, one.patience, 0, 60, 10);
      EXPECT_GE(static_cast<double>(seen.answered), row.least * in_time * seen.seconds);
      EXPECT_LE(seen.left * 50, seen.answered);
    }
  }
}

// What overload has taught refuses no request at four fifths of the capacity, but those that would
// be late: some are where clients are hardly more patient than a full batch is quick.
TEST(Admission, AfterAnOverloadOnlyLateRequestsAreRefused) {
  for (const Overload& one : overloads()) {
    const double capacity = capacity_of(one.machine);
    const double full = static_cast<double>(one.machine.places) / capacity;
    for (unsigned seed = 1; seed <= kSeeds; ++seed) {
      SCOPED_TRACE(name_of(one, seed));
      Admission admission({});
      Crowd crowd(admission, one.machine, seed);
      crowd.run(5 * capacity, one.patience, 0, 60, 0);
      const Seen after = crowd.run(0.79 * capacity, one.patience, 62, 92, 64);
      if (one.patience > 1.55 * full) {
        EXPECT_EQ(after.refused, 0u);
        EXPECT_EQ(after.left, 0u);
      }
      Admission unused({});
      Crowd taken(unused, one.machine, seed);
      taken.refuse_nobody();
      const Seen late = taken.run(0.79 * capacity, one.patience, 62, 92, 64);
      const auto part = [](size_t some, const Seen& seen) {
        return static_cast<double>(some) / static_cast<double>(seen.arrived);
      };
      EXPECT_LE(part(after.refused + after.left, after), part(late.left, late) + 0.02);
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

// A batch of requests that have begun, each with so many tokens to write.
std::vector<Pending> begun(size_t count, size_t output, Time arrival = 0s) {
  return std::vector<Pending>(count, {.arrival = arrival, .output = output, .begun = true});
}

Backlog of(std::vector<Pending> batch, std::vector<Pending> queue, StepSizes sizes) {
  Backlog backlog{.waiting = queue.size(), .batch = std::move(batch), .queue = std::move(queue)};
  for (const auto* list : {&backlog.batch, &backlog.queue}) {
    for (const Pending& one : *list) {
      backlog.prompt_tokens += std::max<size_t>(one.prompt, 1);
      backlog.output_tokens += one.output;
    }
  }
  backlog.free_places = sizes.places - std::min(sizes.places, backlog.batch.size());
  backlog.sizes = sizes;
  return backlog;
}

// Steps of 10 ms, and 1 ms for each token.
void teach(Admission& admission) {
  for (const size_t tokens : {10, 200, 10, 200, 10, 200, 10, 200}) {
    admission.computed(tokens, Time(10ms) + tokens * Time(1ms));
  }
}

TEST(Forecast, GoesThroughTheSteps) {
  const StepCost cost{.fixed = 0.01, .per_token = 0.001};
  const StepSizes sizes{.places = 2, .tokens = 100};
  const auto ends = [&](std::vector<Pending> batch, std::vector<Pending> queue) {
    return forecast(batch, queue, sizes, cost);
  };
  const auto near = [](std::vector<double> got, std::vector<double> want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-9) << i;
  };
  near(ends({}, {}), {});
  // One token in each step.
  near(ends({{.output = 5, .begun = true}}, {}), {5 * 0.011});
  // 150 tokens of prompt are two steps, the second of which writes the first token.
  near(ends({}, {{.prompt = 150, .output = 3}}), {0.11 + 0.06 + 2 * 0.011});
  near(ends({}, {{.prompt = 150, .output = 3, .stream = true}}), {0.11 + 0.06});
  // A stream that has begun has what its client waits for, but takes part in the steps.
  near(ends({{.output = 2, .stream = true, .begun = true}, {.output = 4, .begun = true}}, {}),
       {0, 2 * 0.012 + 2 * 0.011});
  // The third has no place before the first has ended, and what is behind it in no step either.
  near(ends({{.output = 1, .begun = true}, {.output = 2, .begun = true}},
            {{.prompt = 10, .output = 1}}),
       {0.012, 0.012 + 0.021, 0.012 + 0.021});
  // Answers of a million tokens cost no more than short ones.
  EXPECT_NEAR(ends({{.output = 1000000, .begun = true}}, {})[0], 11000, 1e-3);
}

TEST(Admission, LimitsAreTheOperators) {
  Admission admission({.max_waiting = 3, .max_wait = 2s});
  const WorkAhead work{.prompt_tokens = 590, .max_output = 16};
  EXPECT_TRUE(admission.admit({.waiting = 2, .prompt_tokens = 1}, work, 0s).ok());
  const absl::Status full = admission.admit({.waiting = 3, .prompt_tokens = 1}, work, 0s);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(full.GetPayload(Admission::kRetryAfter).has_value());
  teach(admission);
  const StepSizes sizes{.places = 8, .tokens = 200};
  const auto prompt = [](size_t tokens) { return std::vector<Pending>{{.prompt = tokens}}; };
  // 590 tokens and 15 more of output are 0.8 s.
  EXPECT_TRUE(admission.admit(of(prompt(1000), {}, sizes), work, 0s).ok());
  const absl::Status late = admission.admit(of(prompt(1500), {}, sizes), work, 0s);
  EXPECT_EQ(late.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(late.message().find("longer than the limit of 2.0 s"), absl::string_view::npos) << late;
  // A stream's client waits for its first token only.
  WorkAhead stream = work;
  stream.stream = true;
  stream.max_output = 1000;
  EXPECT_TRUE(admission.admit(of(begun(1, 1000), {}, sizes), stream, 0s).ok());
  stream.stream = false;
  EXPECT_TRUE(admission.admit(of(begun(1, 10), {}, sizes), stream, 0s).ok());  // 64 are usual
  // Alone, nothing is too much.
  EXPECT_TRUE(admission.admit({}, {.prompt_tokens = 100000, .max_output = 1}, 0s).ok());
  EXPECT_EQ(admission.refused(), 2u);
}

TEST(Admission, LaterArrivalsDoNotDelayAdmittedRequests) {
  Admission admission({.max_wait = 1s});
  teach(admission);
  const StepSizes sizes{.places = 8, .tokens = 200};
  const WorkAhead work{.prompt_tokens = 400, .max_output = 1};
  // Ten tokens are to be written in 150 ms: 11 ms each, and two of them beside 400 of prompt.
  EXPECT_TRUE(admission.admit(of(begun(1, 10, 400ms), {}, sizes), work, 800ms).ok());
  const absl::Status harms = admission.admit(of(begun(1, 10), {}, sizes), work, 850ms);
  EXPECT_NE(harms.message().find("others"), absl::string_view::npos) << harms;
  // One that is too late already holds nobody up.
  EXPECT_TRUE(admission.admit(of(begun(1, 10), {}, sizes), work, 950ms).ok());
}

TEST(Admission, ARequestThatWaitedTooLongIsRefusedAtItsTurn) {
  Admission admission({.max_wait = 1s});
  teach(admission);
  const auto waits = [](uint64_t id, Time arrival, bool has_begun = false) {
    return Pending{.id = id, .arrival = arrival, .prompt = 190, .output = 1, .begun = has_begun};
  };
  // 0.2 s for each. The third has no place yet; what has begun is not given up.
  const Backlog backlog =
      of({}, {waits(1, 0s), waits(2, 0s, true), waits(3, 500ms), waits(4, 0s)}, {2, 200});
  EXPECT_EQ(admission.too_late(backlog, 700ms), std::vector<uint64_t>{});
  EXPECT_EQ(admission.too_late(backlog, 900ms), std::vector<uint64_t>{1});
  EXPECT_EQ(admission.refused(), 1u);
  EXPECT_TRUE(Admission({}).too_late(backlog, 900ms).empty());  // nobody knows how long they wait
}

TEST(Admission, EveryChoiceHasItsOwnOutput) {
  Admission admission({.max_wait = 2s});
  teach(admission);
  const Backlog others = of(begun(1, 1), {}, {.places = 256, .tokens = 512});
  const auto taken = [&](const WorkAhead& work) { return admission.admit(others, work, 0s).ok(); };
  // 64 tokens are usual, so each choice takes part in 63 steps behind that of the prompts: those
  // are 1.9 s with 19 of them, and 2.06 with 21.
  EXPECT_TRUE(taken({100, 1000, false, 19}));
  EXPECT_FALSE(taken({100, 1000, false, 21}));
  // What a choice may have, if that is less.
  EXPECT_TRUE(taken({100, 10, false, 128}));
  // Of a stream each choice's first token.
  EXPECT_TRUE(taken({1600, 1000, true, 100}));
  EXPECT_FALSE(taken({2000, 1000, true, 100}));
}

// What prompts find in caches costs nothing, as far as it is usual.
TEST(Admission, PromptsThatAreCachedAreQuick) {
  Admission admission({.max_wait = 1s});
  teach(admission);
  const Backlog others = of(begun(1, 1), {}, {.places = 8, .tokens = 200});
  const WorkAhead work{.prompt_tokens = 2000, .max_output = 1};
  EXPECT_FALSE(admission.admit(others, work, 0s).ok());
  for (int i = 0; i < 40; ++i) admission.answered(false, 1, 0.1);
  EXPECT_TRUE(admission.admit(others, work, 0s).ok());
}

// Room for those that come behind is left as far as any come.
TEST(Admission, BehindTheOnlyRequestNoOthersAreExpected) {
  Admission admission({.max_wait = 10s});
  teach(admission);
  const std::vector<Pending> long_one = {{.prompt = 7000}};
  // It takes 7.4 s, this one 2.3 s more; with another like it behind it 5.3 s.
  const WorkAhead work{.prompt_tokens = 2000, .max_output = 16};
  EXPECT_TRUE(admission.admit(of(long_one, {}, {.places = 8, .tokens = 200}), work, 0s).ok());
}

TEST(Admission, WhereNoneMayWaitAPlaceInTheBatchIsTaken) {
  Admission admission({.max_waiting = 0});
  const WorkAhead work{.prompt_tokens = 600, .max_output = 16};
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
  EXPECT_EQ(admission.admit({.free_places = 0, .output_tokens = 9}, work, 0s).message(),
            "the queue is full: 0 of at most 0 requests are waiting; try again later");
}

}  // namespace
}  // namespace baton::engine::serve
