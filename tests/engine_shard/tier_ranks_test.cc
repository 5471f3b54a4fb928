// KV tiers below a model on several ranks: the tokens of one process, whatever becomes of what a
// rank holds, and no rank's or degree's blocks for another's.
#include "kvtransfer/store/kv_store.h"
#include "kvtransfer/store/store_client.h"
#include "tests/engine_serve/damaged_files.h"
#include "tests/engine_shard/degrees.h"
#include "tests/sanitized.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::shard::tier_ranks {
namespace {

using serve::Engine;
using serve::EngineStats;
using serve::KvTierOptions;
using serve::Outcome;
using serve::Request;

constexpr size_t kRequests = kSanitized ? 24 : 60;
constexpr uint64_t kFound = 8 * kRequests;  // tokens that are at least found in a tier
const Time kLong = until_gives_up();        // for what must come
// Too small for all: prompts are forgotten, sequences preempted, prompts cut into many chunks.
constexpr StepLimits kTight{.blocks = 26, .token_budget = 24, .max_sequences = 8};
// Nothing is forgotten: what is loaded was there before.
constexpr StepLimits kWide{.blocks = 400, .token_budget = 64, .max_sequences = 8};

KnownAnswers& answers() {
  static auto* known = new KnownAnswers(kRequests);
  return *known;
}
const std::vector<Request>& requests() { return answers().requests(); }

// Patient: what is in a tier is found.
ServerOptions with(KvTierOptions tiers, int ranks = 2, const StepLimits& limits = kTight) {
  tiers.timeout = kLong;
  return {.role = "all", .ranks = ranks, .limits = limits, .tiers = std::move(tiers)};
}

// An engine with tiers, on one rank or several.
class Tiered : public Server {
 public:
  explicit Tiered(const ServerOptions& options) : Server(options), options_(options) {}
  ~Tiered() {
    for (const absl::Status& status : end()) EXPECT_TRUE(status.ok()) << status;
  }
  EngineStats stats() { return engine().stats(); }

  // All requests, at most `in_flight` at a time: each says what it says alone, and no block is
  // lost. `save_all`: none is written over before all ranks have saved it.
  void run(bool save_all, size_t in_flight = kRequests) {
    outcomes_ = run_all(engine(), requests(), in_flight, [&] {
      if (save_all && engine().tiers()->busy()) engine().tiers()->flush();
    });
    if (save_all) engine().tiers()->flush();
    expect_same(answers().of(options_.arithmetic, *options_.checkpoint), outcomes_);
    EXPECT_EQ(stats().free_blocks, options_.limits.blocks);
    EXPECT_EQ(stats().quarantined_blocks, 0u);
    EXPECT_TRUE(engine().check_integrity().ok()) << engine().check_integrity();
  }
  const std::map<uint64_t, Outcome>& outcomes() const { return outcomes_; }

 private:
  const ServerOptions options_;
  std::map<uint64_t, Outcome> outcomes_;
};

KvTierOptions in_memory() { return {.host_bytes = 64 << 20}; }
KvTierOptions on_disk(const TemporaryFolder& folder) {
  return {.disk = folder.path("kv"), .disk_bytes = 64 << 20};
}

// A store in a process of its own, but for the process.
class Store {
 public:
  Store() {
    store_ = *kvtransfer::store::KvStore::start(
        {.worker = {.name = "store", .providers = {"tcp"}, .key = ranks_key()},
         .memory_bytes = 64 << 20});
  }
  // Patient: what is there is found, however busy the machine is.
  KvTierOptions tiers() const {
    return {.peer = kvtransfer::store::store_client({.store = store_->address(),
                                                     .providers = {"tcp"},
                                                     .key = ranks_key(),
                                                     .lookup_timeout = kLong,
                                                     .load_timeout = kLong})};
  }

 private:
  std::unique_ptr<kvtransfer::store::KvStore> store_;
};

struct Case {
  const char* name;
  int ranks;
  Arithmetic arithmetic;
  bool disk;
  const Checkpoint& (*checkpoint)() = ranks_checkpoint;
};

class TierRanks : public testing::TestWithParam<Case> {};

// Many at a time, preempted, then alone: what was forgotten is loaded.
TEST_P(TierRanks, SayWhatOneProcessSays) {
  const Case& given = GetParam();
  const TemporaryFolder folder;
  ServerOptions options = with(given.disk ? on_disk(folder) : in_memory(), given.ranks);
  options.arithmetic = given.arithmetic;
  options.checkpoint = &given.checkpoint();
  Tiered server(options);
  server.run(true);
  server.run(false);
  EXPECT_GT(server.stats().preemptions, 0u) << "the cache is too large for this test";
  const uint64_t tier_tokens = server.stats().tier_tokens;
  EXPECT_GT(tier_tokens, kFound);
  server.run(false, 1);
  EXPECT_GT(server.stats().tier_tokens, tier_tokens + kFound);
  EXPECT_EQ(server.stats().loads_failed, 0u);
  EXPECT_EQ(server.stats().tiers.corrupt, 0u);
}

INSTANTIATE_TEST_SUITE_P(Ranks, TierRanks,
                         testing::Values(Case{"TwoInMemory", 2, Arithmetic::kFp32, false},
                                         Case{"TwoOnDisk", 2, Arithmetic::kFp32, true},
                                         Case{"FourInMemory", 4, Arithmetic::kFp32, false},
                                         Case{"TwoInBf16", 2, Arithmetic::kBf16, true},
                                         Case{"TwoWithExperts", 2, Arithmetic::kFp32, false,
                                              ranks_expert_checkpoint}),
                         [](const auto& test) { return test.param.name; });

// --- whose blocks these are ----------------------------------------------------------------------

// Runs until so many tokens were loaded: a store is called in the background.
void expect_found(Tiered& server, uint64_t tokens) {
  until([&] { return server.run(true), server.stats().tier_tokens >= tokens; });
  EXPECT_EQ(server.stats().loads_failed, 0u);
  EXPECT_EQ(server.stats().tiers.corrupt, 0u);
}

// Ranks of every degree meet in one store, and each finds what is its own: with another's heads
// the tokens would be others.
TEST(TierKeys, RanksOfAllDegreesShareAStore) {
  const Store store;
  for (const int ranks : {2, 1, 4}) {
    Tiered first(with(store.tiers(), ranks));
    expect_found(first, kFound);
  }
  for (const int ranks : {1, 2, 4}) {
    Tiered second(with(store.tiers(), ranks));
    expect_found(second, kFound);
    EXPECT_GT(second.stats().tiers.from_peer, 0u) << ranks;
  }
}

TEST(TierKeys, ADegreeFindsOnDiskWhatItLeftThereAlone) {
  const TemporaryFolder folder;
  const auto run = [&](int ranks) {
    Tiered server(with(on_disk(folder), ranks, kWide));
    server.run(true);
    return server.stats().tier_tokens;
  };
  for (const int ranks : {2, 1, 4}) EXPECT_EQ(run(ranks), 0u) << ranks;
  for (const int ranks : {2, 1, 4}) EXPECT_GT(run(ranks), kFound) << ranks;
}

// --- bad days ------------------------------------------------------------------------------------

std::string directory_of(const TemporaryFolder& folder, int rank) {
  return folder.path("kv/rank-" + std::to_string(rank) + "-of-2");
}

// What a rank has evicted, or has not got after a restart: nobody loads it, and no load fails.
// Promise(tiers): What one rank lost is a miss for all ranks | a block is present when all ranks
//   say so
TEST(TierRanksOnBadDays, WhatOneRankHasNotGotIsAMissForAll) {
  for (const int rank : {0, 1}) {
    const TemporaryFolder folder;
    const auto run = [&] {
      Tiered server(with(on_disk(folder), 2, kWide));
      server.run(true);
      EXPECT_EQ(server.stats().loads_failed, 0u);
      return server.stats().tier_tokens;
    };
    EXPECT_EQ(run(), 0u);
    std::filesystem::remove_all(directory_of(folder, rank));
    EXPECT_EQ(run(), 0u) << "rank " << rank;
    EXPECT_GT(run(), 500u) << "it has been saved there again";
  }
}

TEST(TierRanksOnBadDays, WhatIsDamagedAtOneRankIsComputedAgainAtAll) {
  for (const int rank : {0, 1}) {
    const TemporaryFolder folder;
    Tiered(with(on_disk(folder), 2, kWide)).run(true);
    serve::damage(directory_of(folder, rank));
    Tiered server(with(on_disk(folder)));
    server.run(false);
    EXPECT_GT(server.stats().tiers.corrupt, 0u);
    EXPECT_GT(server.stats().loads_failed, 0u);
    size_t told = 0;
    for (const auto& [id, outcome] : server.outcomes()) {
      const std::string why(outcome.metrics.load_error.message());
      told += rank == 0 ? !why.empty() : why.find("rank 1: ") != std::string::npos;
    }
    EXPECT_GT(told, 0u) << "rank " << rank;
  }
}

// A rank that has no room, or no tier at all, costs the tiers; requests go on.
TEST(TierRanksOnBadDays, ARankWithoutItsDirectoryCostsTheTiers) {
  for (const int rank : {0, 1}) {
    TemporaryFolder folder;
    folder.file("kv/rank-" + std::to_string(rank) + "-of-2", "a file is in the way");
    Tiered server(with(on_disk(folder)));
    server.run(true);
    server.run(false);
    EXPECT_EQ(server.stats().tier_tokens, 0u) << "rank " << rank;
  }
}

// Requests that clients give up, at any moment, leave nothing behind at any rank.
TEST(TierRanksOnBadDays, AbortedRequestsLeaveNothingBehind) {
  Tiered server(with(in_memory()));
  server.run(true);
  run_and_abort(server, answers());
  server.run(false);
}

// With or without tiers, of one size, under one salt: ranks that differ do not start, and hear in
// what. Rank 0 names the blocks of all, so another salt elsewhere would not be heard of. No log has
// it.
TEST(TierRanksOnBadDays, RanksThatDifferAreToldInWhat) {
  KvTierOptions ours = in_memory(), theirs = in_memory();
  ours.salt = "ours";
  theirs.salt = "theirs";
  const struct {
    RankTiers at_rank_1;
    std::vector<const char*> says;
  } cases[] = {{{}, {"--kv-host-mib", "\"none\" at rank 1"}},
               {theirs.of_rank({1, 2}), {"--kv-salt is"}}};
  for (const auto& [at_rank_1, says] : cases) {
    TwoRanks ranks({.limits = kTight, .tiers = at_rank_1});
    const absl::Status status =
        Leader::create(*ranks.group, ranks.model, kTight, "all", ours.of_rank(ranks.model.shard()))
            .status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    for (const char* what : says) {
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr(what));
    }
    EXPECT_EQ(status.message().find("ours"), std::string::npos) << status;
    EXPECT_EQ(status.message().find("theirs"), std::string::npos) << status;
    EXPECT_TRUE(absl::IsFailedPrecondition(ranks.followers.join()[1]));
  }
}

}  // namespace
}  // namespace baton::engine::shard::tier_ranks
