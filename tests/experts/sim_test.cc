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

// Experts on a simulated network.
class SimExperts : public SimGroup {
 public:
  using SimGroup::SimGroup;

 protected:
  std::vector<std::unique_ptr<Experts>> make(
      const std::function<ExpertsOptions(size_t rank)>& options) {
    std::vector<std::unique_ptr<SteppedExperts>> making;
    for (size_t rank = 0; rank < nodes_; ++rank) {
      making.push_back(std::make_unique<SteppedExperts>(*comms_[rank], options(rank)));
    }
    EXPECT_TRUE(drive(
        [&] {
          bool all = true;
          for (const auto& one : making) all &= one->step();
          return all;
        },
        seconds(5)));
    std::vector<std::unique_ptr<Experts>> made;
    for (const auto& one : making) {
      EXPECT_EQ(one->status(), absl::OkStatus());
      made.push_back(one->take());
    }
    return made;
  }
};

class World : public SimExperts {
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
      : SimExperts({.seed = seed,
                    .nodes = ranks > 0 ? ranks : 2 + random() % 3,
                    .link = {.bytes_per_second = 1e9,
                             .loss = random() % 4 == 0 ? 0.01 : 0,
                             .duplicate = 0.01,
                             .reorder = 0.3}}),
        seed_(seed),
        random_(random),
        mixture_(options_of(random_, nodes_), static_cast<int>(nodes_)) {
    auto experts = make([&](size_t) { return mixture_.options(); });
    all_.resize(nodes_);
    for (size_t rank = 0; rank < nodes_; ++rank) {
      all_[rank].number = static_cast<int>(rank);
      all_[rank].experts = std::move(experts[rank]);
    }
  }

  static ExpertsOptions options_of(std::mt19937_64& random, size_t ranks) {
    ExpertsOptions options = random_options(random, static_cast<int>(ranks));
    options.rank_timeout = kRankTimeout;
    return options;
  }
  bool dead(const Rank& rank) const { return !alive(static_cast<size_t>(rank.number)); }

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
      one.work = must(rank.experts->dispatch_async(one.tokens.rows.data(), one.tokens.count,
                                                   one.tokens.chosen));
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
    one.work = must(mixture_.combine(*rank.experts, one.work, one.tokens, one.out));
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

class Making : public SimExperts {
 public:
  static constexpr uint64_t kLongest = 60;  // us; some are made by then, and some are not
  explicit Making(uint64_t seed)
      : SimExperts({.seed = seed, .nodes = 3}), dies_(std::chrono::microseconds(seed % kLongest)) {}
  // True: they were made.
  bool run() {
    ExpertsOptions options{.experts = 3, .top_k = 1, .hidden = 8, .max_tokens = 2};
    options.rank_timeout = milliseconds(50);
    fabric_.kill(places_[1], now() + dies_);
    std::vector<std::unique_ptr<SteppedExperts>> making;
    for (const auto& comm : comms_) {
      making.push_back(std::make_unique<SteppedExperts>(*comm, options));
    }
    EXPECT_TRUE(drive(
        [&] {
          bool all = true;
          for (size_t rank = 0; rank < nodes_; ++rank) all &= !alive(rank) || making[rank]->step();
          return all;
        },
        seconds(100)));
    bool made = true;
    for (const size_t rank : {0, 2}) {
      const absl::Status& status = making[rank]->status();
      made &= status.ok();
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status) || absl::IsAborted(status) ||
                  absl::IsDeadlineExceeded(status))
          << status;
    }
    drive_for(milliseconds(20));
    return made;
  }

 private:
  const Time dies_;
};

// Promise(collectives): A rank that dies while Experts are made leaves the others an error, or
//   Experts of which it is missing | it dies at random moments of the making
TEST(SimExperts, ARankThatDiesWhileTheyAreMade) {
  const Seeds seeds(kSanitized ? 20 : 60);
  uint64_t made = 0;
  for (uint64_t seed = seeds.begin; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    made += Making(seed).run() ? 1 : 0;
  }
  EXPECT_TRUE(seeds.one || made < seeds.count());
  std::printf("%llu of %llu were made\n", static_cast<unsigned long long>(made),
              static_cast<unsigned long long>(seeds.count()));
}

// One token of rank 0, whose expert is rank 1's first and rank 2's then. Rank 1 stands still before
// it answers; what it answers comes at the worst moment: when rank 2's answer of the next round is
// there, and not summed yet.
class LateAnswer : public SimExperts {
 public:
  LateAnswer() : SimExperts({.seed = 1, .nodes = 3}) {
    experts_ = make([&](size_t rank) {
      ExpertsOptions options = mixture_.options();
      options.rank_timeout = rank == 1 ? seconds(10) : milliseconds(50);
      return options;
    });
  }
  ~LateAnswer() {
    drive_for(milliseconds(20));
    experts_.clear();
  }

  void run() {
    dispatch({0, 1, 2}, 1, 1.0f);
    ASSERT_TRUE(end({0, 1, 2}));
    fabric_.freeze(places_[1], now(), now() + seconds(1));
    ASSERT_TRUE(drive([&] { return frozen(1); }, seconds(1)));
    combine({0, 1, 2});  // rank 1 sends when it goes on
    ASSERT_TRUE(end({0, 2}));
    EXPECT_EQ(experts_[0]->masked(), std::vector<int>{1});
    mixture_.expect(tokens_, {1});
    EXPECT_TRUE(same_bits(out_, tokens_.wanted));

    dispatch({0, 2}, 2, 3.0f);
    ASSERT_TRUE(end({0, 2}));
    combine({0, 2});
    drive_for(milliseconds(20));  // rank 2's answer has come, and rank 0 has not looked
    ASSERT_TRUE(frozen(1));
    ASSERT_TRUE(drive([&] { return !frozen(1); }, seconds(2)));
    ASSERT_TRUE(end({1}));  // it has sent its answer, which was acknowledged
    ASSERT_TRUE(end({0, 2}));
    EXPECT_TRUE(same_bits(out_, tokens_.wanted)) << "the late answer is in the sum";
  }

 private:
  void dispatch(const std::vector<size_t>& ranks, int expert, float value) {
    tokens_ = {.count = 1, .chosen = {expert}, .weights = {1}};
    tokens_.rows.resize(mixture_.row_bytes());
    for (size_t i = 0; i < kHidden; ++i) {
      set_element(DataType::kF32, tokens_.rows.data(), i, value + static_cast<float>(i));
    }
    mixture_.expect(tokens_, {});
    for (const size_t rank : ranks) {
      works_[rank] =
          must(rank == 0 ? experts_[0]->dispatch_async(tokens_.rows.data(), 1, tokens_.chosen)
                         : experts_[rank]->dispatch_async(nullptr, 0, {}));
    }
  }
  void combine(const std::vector<size_t>& ranks) {
    for (const size_t rank : ranks) {
      const auto rows = must(experts_[rank]->received(works_[rank]));
      mixture_.answer(rows);
      if (rank == 0) out_.assign(tokens_.wanted.size(), std::byte{0x5a});
      works_[rank] = must(rank == 0 ? experts_[0]->combine_async(works_[0], tokens_.weights,
                                                                 out_.data(), out_.size())
                                    : experts_[rank]->combine_async(works_[rank], {}, nullptr, 0));
    }
  }
  bool end(std::vector<size_t> ranks) {
    for (int ms = 0; ms < 1000; ++ms) fabric_.at(now() + milliseconds(ms), [] {});
    return drive(
        [&] {
          std::erase_if(ranks, [&](size_t rank) {
            const auto ended = experts_[rank]->test(works_[rank]);
            EXPECT_EQ(ended.value_or(absl::OkStatus()), absl::OkStatus()) << "rank " << rank;
            return ended.has_value();
          });
          return ranks.empty();
        },
        seconds(20));
  }

  static constexpr size_t kHidden = 8;
  static ExpertsOptions options() {
    ExpertsOptions options{.experts = 3, .top_k = 1, .hidden = kHidden, .max_tokens = 2};
    options.type = DataType::kF32;
    return options;
  }
  const Mixture mixture_{options(), 3};
  std::vector<std::unique_ptr<Experts>> experts_;
  std::array<Work, 3> works_;
  Tokens tokens_;
  std::vector<std::byte> out_;
};

// Promise(collectives): An answer that a masked rank sends late lands where no answer of a later
//   round is | it lands between the arrival of that round's answers and their sum
TEST(SimExperts, ALateAnswerIsInNoOtherSum) { LateAnswer().run(); }

}  // namespace
}  // namespace baton
