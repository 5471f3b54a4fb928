// Rank 0's store over stores that do what the test says: nothing is here, saved or ended before it
// is at every rank.
#include "engine/shard/tier_ranks.h"
#include "tests/engine_shard/ranks.h"
#include "tests/test.h"

namespace baton::engine::shard {
namespace {

using kvtransfer::tiers::TierFound;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierKeys;
using kvtransfer::tiers::TierLoadId;
using kvtransfer::tiers::TierSave;
using kvtransfer::tiers::TierStats;
using kvtransfer::tiers::TierStore;

constexpr StepLimits kSmall{.blocks = 4, .token_budget = 24, .max_sequences = 2};
constexpr uint32_t kLayers = 2;

TierKey key_of(int number) { return TierKeys({.weights = "w"}).key(std::to_string(number)); }

// What a rank's store says; the test's thread writes it, the rank's reads it.
struct TierScript {
  std::atomic<size_t> found = 0;
  std::atomic<bool> pending = false;
  std::atomic<bool> takes = true;
  std::atomic<bool> unpins = false;
  std::atomic<uint32_t> layers = 0;
  std::atomic<bool> quiet = false;
  // What it has heard.
  std::atomic<int> asked = 0;
  std::atomic<int> saved = 0;
  std::atomic<int> loads = 0;
  std::atomic<int> ended = 0;
};

class ScriptedStore final : public TierStore {
 public:
  explicit ScriptedStore(TierScript& script) : script_(script) {}

  bool is_on() const override { return true; }
  TierFound find(std::span<const TierKey> keys) override {
    ++script_.asked;
    if (script_.pending) return {.pending = true};
    return find_known(keys);
  }
  TierFound find_known(std::span<const TierKey> keys) override {
    const size_t found = std::min(script_.found.load(), keys.size());
    return {.blocks = found};
  }
  size_t save(std::span<const TierSave> saves) override {
    if (!script_.takes) return 0;
    for (const TierSave& save : saves) blocks_.push_back(save.block);
    ++script_.saved;
    return saves.size();
  }
  std::vector<uint32_t> unpinned() override {
    return script_.unpins ? std::exchange(blocks_, {}) : std::vector<uint32_t>();
  }
  bool has_pinned() const override { return !blocks_.empty(); }
  TierLoadId load(std::span<const TierKey>, std::span<const uint32_t>, Time) override {
    ++script_.loads;
    return 77;
  }
  uint32_t layers_loaded(TierLoadId id) override { return id == 77 ? script_.layers.load() : 0; }
  absl::Status load_status(TierLoadId) override { return absl::OkStatus(); }
  bool end_load(TierLoadId) override {
    ++script_.ended;
    return script_.quiet;
  }
  void wait(Time, int) override { std::this_thread::yield(); }
  void flush() override {}
  TierStats stats() const override { return {}; }
  std::string explain() const override { return "scripted"; }

 private:
  TierScript& script_;
  std::vector<uint32_t> blocks_;
};

// Two ranks with such stores; rank 0's calls are the test's.
class TierParts : public testing::Test {
 protected:
  TierParts() {
    leader_ = *Leader::create(*ranks_.group, ranks_.model, kSmall, "all", kTiers);
    store_ = std::make_unique<RanksTierStore>(*leader_, std::make_unique<ScriptedStore>(mine_),
                                              ranks_.group->shard(), kLayers, Clock::steady());
  }
  absl::Status follow(Group& group, const Model& model) {
    TierFollower follower(std::make_unique<ScriptedStore>(theirs_), group.shard(), kLayers);
    absl::Status status = group.agree(settings_of(model, kSmall, "all", kTiers)).status();
    while (status.ok()) {
      const auto message = group.receive();
      if (!message.ok()) return message.status();
      const Command command = *base::read_fields<Command>(*message, "a command");
      if (command.kind == CommandKind::kStop) break;
      for (const TierCall& call : command.tier_calls) follower.make(call);
      Report report;
      follower.report(report);
      std::string bytes;
      base::write_fields(report, bytes);
      status = group.exchange(bytes).status();
    }
    return status;
  }
  // Rank 1 has been asked at least once more than it had to be.
  void hear() {
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(leader_->ask().ok());
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [&] { store_->wait(std::chrono::milliseconds(1), -1); }, NoState(), from);
  }
  TierFound found(const std::vector<TierKey>& keys) {
    TierFound answer;
    until([&] { return !(answer = store_->find(keys)).pending; });
    return answer;
  }

  inline static const RankTiers kTiers = RankTierOptions{.store = {.host_bytes = 1}};
  const std::vector<TierKey> chain_ = {key_of(1), key_of(2), key_of(3)};
  const std::vector<uint32_t> blocks_ = {0, 1, 2};
  TierScript mine_;
  TierScript theirs_;
  TwoRanks ranks_{{}, [this](Group& group, const Model& model) { return follow(group, model); }};
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<RanksTierStore> store_;
};

TEST_F(TierParts, WhatAllHaveIsFound) {
  mine_.found = 3;
  theirs_.found = 2;
  EXPECT_TRUE(store_->find(chain_).pending);
  EXPECT_EQ(found(chain_).blocks, 2u);
  EXPECT_EQ(found({chain_[0]}).blocks, 1u);
  mine_.found = 1;  // evicted meanwhile
  EXPECT_EQ(found(chain_).blocks, 1u);
  EXPECT_EQ(theirs_.asked, 1) << "one chain is asked for once";
}

TEST_F(TierParts, WhatWasSavedSinceIsAskedForAgain) {
  mine_.found = theirs_.found = 2;
  EXPECT_EQ(found(chain_).blocks, 2u);
  mine_.found = theirs_.found = 3;
  EXPECT_EQ(found(chain_).blocks, 3u);
  const std::vector<TierKey> other = {key_of(4)};
  EXPECT_EQ(found(other).blocks, 1u);
  EXPECT_EQ(theirs_.asked, 3);
}

TEST_F(TierParts, OthersAreNotAskedForWhatRank0HasNot) {
  theirs_.found = 3;
  EXPECT_FALSE(store_->find(chain_).pending);
  EXPECT_EQ(store_->find(chain_).blocks, 0u);
  hear();
  EXPECT_EQ(theirs_.asked, 0);
}

// Another process has been asked, by either.
TEST_F(TierParts, AnAnswerThatIsPendingAtOneRankIsAtAll) {
  mine_.found = theirs_.found = 3;
  theirs_.pending = true;
  EXPECT_TRUE(store_->find(chain_).pending);
  hear();
  EXPECT_TRUE(store_->find(chain_).pending);
  theirs_.pending = false;
  mine_.pending = true;
  hear();
  EXPECT_TRUE(store_->find(chain_).pending);
  mine_.pending = false;
  EXPECT_EQ(found(chain_).blocks, 3u);
}

TEST_F(TierParts, ABlockIsHeldUntilAllRanksHaveLetItGo) {
  const TierSave save{chain_[0], 3};
  ASSERT_EQ(store_->save(std::span(&save, 1)), 1u);
  mine_.unpins = true;
  until([&] { return theirs_.saved == 1; });
  hear();
  EXPECT_TRUE(store_->unpinned().empty()) << "rank 1 is still copying";
  EXPECT_TRUE(store_->has_pinned());
  mine_.unpins = false;
  theirs_.unpins = true;
  const TierSave next{chain_[1], 2};
  ASSERT_EQ(store_->save(std::span(&next, 1)), 1u);
  hear();
  EXPECT_EQ(store_->unpinned(), std::vector<uint32_t>{3}) << "of the other, rank 0 is";
  mine_.unpins = true;
  EXPECT_EQ(store_->unpinned(), std::vector<uint32_t>{2});
  EXPECT_FALSE(store_->has_pinned());
}

TEST_F(TierParts, WhatARankDoesNotTakeIsNotHeld) {
  theirs_.takes = false;
  mine_.unpins = true;
  const TierSave save{chain_[0], 3};
  ASSERT_EQ(store_->save(std::span(&save, 1)), 1u);
  std::vector<uint32_t> free;
  until([&] { return !(free = store_->unpinned()).empty(); });
  EXPECT_EQ(free, std::vector<uint32_t>{3});
  mine_.takes = false;
  EXPECT_EQ(store_->save(std::span(&save, 1)), 0u);
}

TEST_F(TierParts, ALoadIsHereWhenAllOfItIsHereAtAllRanks) {
  const TierLoadId id = store_->load(chain_, blocks_, kNever);
  until([&] { return theirs_.loads == 1; });
  mine_.layers = kLayers;
  theirs_.layers = kLayers - 1;
  hear();
  EXPECT_EQ(store_->layers_loaded(id), 0u);
  theirs_.layers = kLayers;
  until([&] { return store_->layers_loaded(id) == kLayers; });
  mine_.layers = kLayers - 1;  // no step waits for one layer
  EXPECT_EQ(store_->layers_loaded(id), 0u);
  EXPECT_TRUE(store_->load_status(id).ok());
}

TEST_F(TierParts, ALoadHasEndedWhenItHasAtAllRanks) {
  const TierLoadId id = store_->load(chain_, blocks_, kNever);
  EXPECT_FALSE(store_->end_load(id));
  mine_.quiet = true;
  until([&] { return theirs_.ended > 2; });
  EXPECT_FALSE(store_->end_load(id)) << "bytes may still come at rank 1";
  theirs_.quiet = true;
  until([&] { return store_->end_load(id); });
  mine_.quiet = false;
  EXPECT_TRUE(store_->end_load(id)) << "there is no such load any more";
  EXPECT_TRUE(absl::IsNotFound(store_->load_status(id)));
}

// Nobody can ask the other ranks any more: what is under way counts as ended there.
TEST_F(TierParts, AFailedGroupHoldsNothingBack) {
  const TierLoadId id = store_->load(chain_, blocks_, kNever);
  const TierSave save{chain_[0], 3};
  ASSERT_EQ(store_->save(std::span(&save, 1)), 1u);
  mine_.quiet = true;
  mine_.found = 3;
  EXPECT_FALSE(store_->end_load(id));
  ranks_.group->abort(absl::AbortedError("by the test"));
  EXPECT_FALSE(store_->load_status(id).ok());
  EXPECT_TRUE(store_->end_load(id));
  EXPECT_TRUE(store_->unpinned().empty()) << "rank 0 reads it";
  mine_.unpins = true;
  EXPECT_EQ(store_->unpinned(), std::vector<uint32_t>{3});
  EXPECT_EQ(store_->save(std::span(&save, 1)), 1u);
  EXPECT_EQ(store_->unpinned(), std::vector<uint32_t>{3});
  EXPECT_FALSE(store_->has_pinned());
  EXPECT_FALSE(store_->is_on());
  EXPECT_FALSE(store_->find(chain_).pending);
  EXPECT_EQ(store_->find(chain_).blocks, 0u);
}

}  // namespace
}  // namespace baton::engine::shard
