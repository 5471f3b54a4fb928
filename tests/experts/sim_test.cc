// Experts in virtual time, over a network that loses, repeats and overtakes; ranks that die there.
//
// tests/seeds.h says which seeds run; BATON_ROUTINGS how many dispatches of a rank in all. A
// million:
//   BATON_ROUTINGS=1000000 nice -n 19 ./experts_tests --gtest_filter='*EveryRouting*'
#include "collectives/experts/impl.h"
#include "tests/communicator/sim_nodes.h"
#include "tests/experts/mixture.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"

namespace baton {

// Makes Experts without blocking.
class SteppedExperts {
 public:
  SteppedExperts(Communicator& comm, const ExpertsOptions& options)
      : impl_(std::make_unique<Experts::Impl>(comm, options)), status_(impl_->begin()) {}
  // False: it is not made yet.
  bool step() {
    while (status_.ok() && impl_ != nullptr && impl_->making()) {
      const auto ended = impl_->maker().test(impl_->pending());
      if (!ended.has_value()) return false;
      status_ = ended->ok() ? impl_->advance() : *ended;
    }
    return true;
  }
  const absl::Status& status() const { return status_; }
  std::unique_ptr<Experts> take() {
    return std::unique_ptr<Experts>(new Experts(std::move(impl_)));
  }

 private:
  std::unique_ptr<Experts::Impl> impl_;
  absl::Status status_;
};

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class World : public SimGroup {
 public:
  static constexpr int kRounds = 100;
  static constexpr Time kRankTimeout = milliseconds(50);

  // `ranks` 0: some.
  explicit World(uint64_t seed, size_t ranks = 0)
      : World(seed, ranks, std::mt19937_64(seed * 7919 + 5)) {}
  ~World() {
    drive_for(milliseconds(20));
    all_.clear();
  }

  size_t nodes() const { return nodes_; }
  void run(int rounds) {
    ASSERT_TRUE(drive(
        [&] {
          for (Rank& rank : all_) step(rank, rounds);
          return testing::Test::HasFailure() || over(rounds);
        },
        seconds(60)))
        << "a round hangs: " << state();
  }
  // One rank dies in virtual time, at some moment of the first rounds, or stands still in a combine
  // and goes on when the others have masked it.
  void run_without_one(bool dies) {
    gone_ = static_cast<int>(random_() % nodes_);
    if (dies) {
      fabric_.kill(places_[static_cast<size_t>(gone_)],
                   now() + std::chrono::microseconds(random_() % 300));
    } else {
      stops_at_ = 1 + static_cast<int>(random_() % 8);
    }
    // Deadlines are seen within a millisecond.
    for (int ms = 0; ms < 1000; ++ms) fabric_.at(now() + milliseconds(ms), [] {});
    run(dies ? kRounds : 4 * kRounds);
    for (const Rank& rank : all_) {
      if (rank.number == gone_) continue;
      EXPECT_EQ(rank.experts->masked(), std::vector<int>{gone_}) << rank.experts->explain();
      EXPECT_LE(rank.longest, milliseconds(100)) << "in virtual time";
    }
  }

 private:
  struct Rank {
    int number = 0;
    std::unique_ptr<Experts> experts;
    int begun = 0, ended = 0;
    struct Open {
      Tokens tokens;
      Work work;
      bool combining = false;
      std::vector<std::byte> out;
    };
    std::deque<Open> open;
    Time last{}, longest{};
  };

  World(uint64_t seed, size_t ranks, std::mt19937_64 random)
      : SimGroup({.seed = seed,
                  .nodes = ranks > 0 ? ranks : 2 + random() % 3,
                  .link = {.bytes_per_second = 1e9,
                           .loss = random() % 4 == 0 ? 0.01 : 0,
                           .duplicate = 0.01,
                           .reorder = 0.3}}),
        seed_(seed),
        random_(random),
        mixture_(options_of(random_, nodes_), static_cast<int>(nodes_)) {
    make();
  }

  static ExpertsOptions options_of(std::mt19937_64& random, size_t ranks) {
    ExpertsOptions options = random_options(random, static_cast<int>(ranks));
    options.rank_timeout = kRankTimeout;
    return options;
  }
  bool dead(const Rank& rank) const { return !alive(static_cast<size_t>(rank.number)); }

  void make() {
    std::vector<std::unique_ptr<SteppedExperts>> making;
    for (const auto& comm : comms_) {
      making.push_back(std::make_unique<SteppedExperts>(*comm, mixture_.options()));
    }
    EXPECT_TRUE(drive(
        [&] {
          bool all = true;
          for (const auto& one : making) all &= one->step();
          return all;
        },
        seconds(5)));
    all_.resize(nodes_);
    for (size_t rank = 0; rank < nodes_; ++rank) {
      EXPECT_EQ(making[rank]->status(), absl::OkStatus());
      all_[rank].number = static_cast<int>(rank);
      all_[rank].experts = making[rank]->take();
    }
  }

  void step(Rank& rank, int rounds) {
    const auto node = static_cast<size_t>(rank.number);
    if (dead(rank)) return;
    // What it begins now, it sends when it goes on.
    const bool stops =
        rank.number == gone_ && stopped_ && rank.ended == stops_at_ && !rank.open.front().combining;
    if (stops && frozen(node)) combine(rank, rank.open.front());
    if (stops || frozen(node)) return;
    const Time at = now();
    if (rank.last == Time::zero()) rank.last = at;
    while (rank.begun < rounds &&
           rank.open.size() < static_cast<size_t>(mixture_.options().in_flight)) {
      Rank::Open& one = rank.open.emplace_back();
      one.tokens = mixture_.tokens(random_);
      const auto work =
          rank.experts->dispatch_async(one.tokens.rows.data(), one.tokens.count, one.tokens.chosen);
      ASSERT_TRUE(work.ok()) << work.status();
      one.work = *work;
      ++rank.begun;
    }
    while (!rank.open.empty()) {
      Rank::Open& one = rank.open.front();
      const auto ended = rank.experts->test(one.work);
      if (!ended.has_value()) return;
      ASSERT_EQ(*ended, absl::OkStatus()) << state();
      rank.longest = std::max(rank.longest, at - std::exchange(rank.last, at));
      if (!one.combining) {
        if (rank.number == gone_ && rank.ended == stops_at_) {
          stopped_ = true;
          fabric_.freeze(places_[node], at, at + kRankTimeout + milliseconds(3));
          return;
        }
        combine(rank, one);
        continue;
      }
      const std::vector<int> missing = rank.experts->missing(one.work);
      if (!missing.empty()) {
        // The one that stood still hears from the others no more.
        if (rank.number != gone_) {
          ASSERT_EQ(missing, std::vector<int>{gone_});
        }
        mixture_.expect(one.tokens, missing);
      }
      ASSERT_TRUE(same_bits(one.out, one.tokens.wanted)) << state();
      rank.open.pop_front();
      ++rank.ended;
      if (rank.begun < rounds) return step(rank, rounds);
    }
  }
  void combine(Rank& rank, Rank::Open& one) {
    const auto rows = rank.experts->received(one.work);
    ASSERT_TRUE(rows.ok()) << rows.status();
    mixture_.answer(*rows);
    one.out.resize(one.tokens.wanted.size());
    const auto work =
        rank.experts->combine_async(one.work, one.tokens.weights, one.out.data(), one.out.size());
    ASSERT_TRUE(work.ok()) << work.status();
    one.work = *work;
    one.combining = true;
  }
  bool over(int rounds) const {
    return std::all_of(all_.begin(), all_.end(),
                       [&](const Rank& rank) { return dead(rank) || rank.ended == rounds; });
  }
  std::string state() const {
    std::ostringstream out;
    out << "seed " << seed_ << "; ";
    for (const Rank& rank : all_) {
      out << "rank " << rank.number << (dead(rank) ? " (dead)" : "") << " has ended " << rank.ended
          << " of " << rank.begun << " rounds; " << rank.experts->explain();
    }
    return out.str();
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  const Mixture mixture_;
  std::vector<Rank> all_;
  int gone_ = -1, stops_at_ = -1;
  bool stopped_ = false;
};

// Promise(collectives): Every routing of tokens to experts gives exact sums, whatever the network
//   loses, repeats or overtakes | thousands of random rounds in virtual time in each run, a million
//   now and then
TEST(SimExperts, EveryRoutingIsExact) {
  const uint64_t wanted = number_of("BATON_ROUTINGS", kSanitized ? 400 : 4000);
  // What a world costs to make is worth some rounds.
  const int rounds = wanted > 100'000 ? 1000 : World::kRounds;
  const Seeds seeds(UINT32_MAX);
  uint64_t routings = 0, seed = seeds.begin;
  for (; seed < seeds.end && routings < wanted && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    World world(seed);
    world.run(rounds);
    routings += static_cast<uint64_t>(rounds) * world.nodes();
  }
  std::printf("%llu routings in %llu worlds\n", static_cast<unsigned long long>(routings),
              static_cast<unsigned long long>(seed - seeds.begin));
}

// Promise(collectives): A rank that falls silent in the midst of Experts, though no connection says
//   so, is masked within 100 ms of virtual time where rank_timeout is 50 ms | killed at random
//   moments
TEST(SimExperts, ASilentRankIsMasked) {
  const Seeds seeds(kSanitized ? 4 : 20);
  for (uint64_t seed = seeds.begin; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    World(seed, 2).run_without_one(true);
  }
}

// Promise(collectives): What a rank that stood still sends after the others have masked it changes
//   nothing in their rounds | it stops in the midst of a combine, and goes on while they do
TEST(SimExperts, WhatAMaskedRankSendsLateChangesNothing) {
  const Seeds seeds(kSanitized ? 2 : 8);
  for (uint64_t seed = seeds.begin; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    World(seed, 3).run_without_one(false);
  }
}

}  // namespace
}  // namespace baton
