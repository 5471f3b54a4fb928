// Experts over every provider: what comes back has the bits that one rank gives which has all
// experts.
#include "collectives/experts.h"

#include <malloc.h>

#include "tests/communicator/over_providers.h"
#include "tests/experts/mixture.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/used.h"

namespace baton {
namespace {

class ExpertsOf : public OverProviders {};

// Rounds of one rank, as many open at a time as may be.
void run_rounds(Experts& experts, const Mixture& mixture, uint64_t seed, int rounds) {
  std::mt19937_64 random(seed * 100 + static_cast<uint64_t>(experts.rank()));
  struct Open {
    Tokens tokens;
    Work work;
  };
  std::deque<Open> open;
  for (int round = 0; round < rounds || !open.empty(); ++round) {
    if (round < rounds) {
      Open& one = open.emplace_back();
      one.tokens = mixture.tokens(random);
      const auto work =
          must(experts.dispatch_async(one.tokens.rows.data(), one.tokens.count, one.tokens.chosen));
      one.work = work;
      if (open.size() < static_cast<size_t>(mixture.options().in_flight) && round + 1 < rounds) {
        continue;
      }
    }
    Open& oldest = open.front();
    ASSERT_EQ(experts.wait(oldest.work), absl::OkStatus());
    std::vector<std::byte> out;
    const auto work = must(mixture.combine(experts, oldest.work, oldest.tokens, out));
    ASSERT_EQ(experts.wait(work), absl::OkStatus());
    ASSERT_TRUE(same_bits(out, oldest.tokens.wanted))
        << "round " << round << " of rank " << experts.rank() << ": " << experts.explain();
    ASSERT_TRUE(experts.missing(work).empty());
    ASSERT_TRUE(experts.missing(oldest.work).empty());
    open.pop_front();
  }
}

// Promise(collectives): Experts on any number of ranks give a token the bits that the engine's own
//   mixture gives on one, over every provider, from rows of f32, bf16, f16 or e4m3 | random
//   mixtures and routings, exact and with a capacity, several rounds at a time
TEST_P(ExpertsOf, RandomRoundsHaveTheBitsOfOneRank) {
  const Seeds seeds(kSanitized ? 2 : 8);
  for (uint64_t seed = seeds.begin; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::mt19937_64 random(seed);
    const int ranks = 1 + static_cast<int>(seed % 4);
    const Mixture mixture(random_options(random, ranks), ranks);
    run_group(ranks, options(), [&](Communicator& comm) {
      const auto experts = experts_of(comm, mixture.options());
      if (experts != nullptr) run_rounds(*experts, mixture, seed, 12);
    });
  }
}

// Rows of many pages, which are put from where they are.
TEST_P(ExpertsOf, LargeRowsGoFromWhereTheyAre) {
  for (const ExpertsMode mode : {ExpertsMode::kThroughput, ExpertsMode::kLowLatency}) {
    ExpertsOptions large{.experts = 8, .top_k = 3, .hidden = 4099, .max_tokens = 40};
    large.type = DataType::kF32;
    large.mode = mode;
    const Mixture mixture(large, 2);
    run_group(2, options(), [&](Communicator& comm) {
      const auto experts = experts_of(comm, large);
      if (experts != nullptr) run_rounds(*experts, mixture, 5, 3);
    });
  }
}

TEST_P(ExpertsOf, SlotsAreInTheOrderOfRanksAndTokens) {
  constexpr int kRanks = 3, kTopK = 4, kTokens = 9;
  ExpertsOptions of{.experts = 12, .top_k = kTopK, .hidden = 2, .max_tokens = kTokens};
  of.type = DataType::kF32;
  const auto chosen_by = [&](int rank) {
    std::mt19937_64 random(static_cast<uint64_t>(rank));
    std::vector<int32_t> all(static_cast<size_t>(of.experts)), chosen;
    std::iota(all.begin(), all.end(), 0);
    for (int token = 0; token < kTokens; ++token) {
      std::shuffle(all.begin(), all.end(), random);
      chosen.insert(chosen.end(), all.begin(), all.begin() + kTopK);
    }
    return chosen;
  };
  run_group(kRanks, options(), [&](Communicator& comm) {
    const auto experts = experts_of(comm, of);
    ASSERT_NE(experts, nullptr);
    std::vector<std::array<float, 2>> rows;
    for (int token = 0; token < kTokens; ++token) {
      rows.push_back({static_cast<float>(comm.rank()), static_cast<float>(token)});
    }
    const auto received = must(experts->dispatch(rows.data(), kTokens, chosen_by(comm.rank())));
    for (const ExpertGroup& group : received.groups) {
      int slot = group.first;
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::vector<int32_t> chosen = chosen_by(rank);
        for (int token = 0; token < kTokens; ++token) {
          const auto first = chosen.begin() + token * kTopK;
          if (std::find(first, first + kTopK, group.expert) == first + kTopK) continue;
          const auto* const row = reinterpret_cast<const float*>(received.row(slot++));
          ASSERT_EQ(row[0], static_cast<float>(rank)) << "expert " << group.expert;
          ASSERT_EQ(row[1], static_cast<float>(token)) << "expert " << group.expert;
        }
      }
      EXPECT_EQ(slot, group.first + group.count) << "expert " << group.expert;
    }
    std::vector<std::array<float, 2>> out(rows.size());
    EXPECT_EQ(experts->combine(received, std::vector<float>(size_t{kTokens} * kTopK, 1), out.data(),
                               out.size() * sizeof out[0]),
              absl::OkStatus());
  });
}

TEST_P(ExpertsOf, ItsGroupOutlivesTheCommunicator) {
  const Mixture mixture({.experts = 4, .top_k = 2, .hidden = 8, .max_tokens = 4}, 2);
  run_group(2, options(), [&](Communicator& comm) {
    auto own = must(comm.split(0, comm.rank()));
    const auto experts = experts_of(*own, mixture.options());
    own->abort(absl::CancelledError("the trainer goes another way"));
    own.reset();
    if (experts != nullptr) run_rounds(*experts, mixture, 1, 5);
  });
}

// Promise(collectives): 10,000 rounds of Experts leave descriptors, threads, mappings and bytes as
//   they were | over every provider, several rounds at a time; less than 7 bytes a round on the
//   heap
TEST_P(ExpertsOf, TenThousandRoundsLeaveNothingBehind) {
  constexpr int kRounds = kSanitized ? 500 : 10'000;
  ExpertsOptions small{.experts = 8, .top_k = 3, .hidden = 24, .max_tokens = 6};
  small.in_flight = 2;
  const Mixture mixture(small, 2);
  run_group(2, options(), [&](Communicator& comm) {
    const auto experts = experts_of(comm, small);
    ASSERT_NE(experts, nullptr);
    run_rounds(*experts, mixture, 3, 300);
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    const Used before;
    const size_t heap = mallinfo2().uordblks;
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    run_rounds(*experts, mixture, 4, kRounds);
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    // One looks, while the other does nothing.
    if (comm.rank() == 0) {
      const auto grown = [&] { return static_cast<ptrdiff_t>(mallinfo2().uordblks - heap); };
      until([&] { return Used().within(before) && (kSanitized || grown() < 64 << 10); },
            [&] { comm.progress(); },
            [&] {
              return absl::StrCat("before: ", before.text(), ", now: ", Used().text(), " and ",
                                  grown(), " bytes more on the heap");
            });
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, ExpertsOf, testing::Values("shm", "tcp", "verbs_fake"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
