// Rank 0's connector over connectors that do what the test says: nothing has ended before it has at
// every rank.
#include "engine/shard/kv_ranks.h"

#include "tests/engine_shard/ranks.h"
#include "tests/test.h"

namespace baton::engine::shard {
namespace {

using kvtransfer::KvConnector;
using kvtransfer::KvJob;
using kvtransfer::KvLoad;
using kvtransfer::KvRequestId;

constexpr StepLimits kLimits{.blocks = 4, .token_budget = 24, .max_sequences = 2};

// What a rank's connector says; the test's thread writes it, the rank's reads it.
struct Script {
  std::atomic<uint32_t> layers = 0;  // of every load
  std::atomic<bool> broken = false;
  std::atomic<bool> quiet = false;
  std::atomic<bool> wanted = true;
  std::atomic<bool> saved = false;
  // What it has heard.
  std::atomic<int> reports = 0;
  std::atomic<int> started = 0;
  std::atomic<int> ended = 0;
  std::atomic<int> bound = 0;
  std::atomic<int> finished = 0;
  std::atomic<uint64_t> layers_saved = 0;
};

class Scripted : public KvConnector {
 public:
  explicit Scripted(Script& script) : script_(script) {}

  absl::StatusOr<void*> allocate_cache(const kvtransfer::KvLayout& layout) override {
    memory_.reset(
        static_cast<std::byte*>(std::aligned_alloc(4096, (layout.bytes() + 4095) / 4096 * 4096)));
    return memory_.get();
  }
  std::string address() const override { return "baton1:scripted"; }
  kvtransfer::KvConnectorStats stats() const override {
    ++script_.reports;  // one is part of each
    return {.bytes_sent = 3};
  }
  void progress() override {}
  void wait(Time, int) override { std::this_thread::yield(); }
  absl::Status start_load(KvLoad) override {
    ++script_.started;
    return absl::OkStatus();
  }
  uint32_t layers_loaded(KvRequestId) override { return script_.layers; }
  absl::Status load_status(KvRequestId) override {
    return script_.broken ? absl::DataLossError("broken") : absl::OkStatus();
  }
  absl::Status wait_for_layer(KvRequestId, uint32_t) override { return absl::OkStatus(); }
  bool end_load(KvRequestId) override {
    ++script_.ended;
    return script_.quiet;
  }
  std::optional<KvJob> next_job() override { return std::exchange(job, std::nullopt); }
  absl::StatusOr<uint64_t> bind(const kvtransfer::KvBinding& binding) override {
    EXPECT_EQ(binding.key, "k");
    EXPECT_EQ(binding.tokens, 32u);
    EXPECT_EQ(binding.loads, 2u);
    ++script_.bound;
    return 77;
  }
  bool is_wanted(uint64_t) override { return script_.wanted; }
  absl::Status save_layer(uint64_t, uint32_t, uint32_t, absl::Span<const uint32_t>) override {
    ++script_.layers_saved;
    return absl::OkStatus();
  }
  void finish_job(uint64_t, const absl::Status&) override { ++script_.finished; }
  bool is_saved(uint64_t) override { return script_.saved; }

  std::optional<KvJob> job;

 private:
  Script& script_;
  std::unique_ptr<std::byte, void (*)(void*)> memory_{nullptr, std::free};
};

// Two ranks with such connectors; rank 0's calls are the test's.
class KvRanks : public testing::Test {
 protected:
  KvRanks() {
    group_ = *Group::meet(place_.options(0));
    model_.emplace(*Model::create(ranks_checkpoint(), Arithmetic::kFp32, group_->shard()));
    leader_ = *Leader::create(*group_, *model_, kLimits, "decode");
    auto own = std::make_unique<Scripted>(mine_);
    own_ = own.get();
    connector_ = *RanksConnector::create(*leader_, std::move(own));
    KvMemory::make(*model_, kLimits.blocks, connector_.get()).value();
  }
  ~KvRanks() override {
    connector_ = nullptr;
    leader_ = nullptr;
    group_ = nullptr;
  }
  // Rank 1 has made all calls, and has reported what came of them: it was asked at least once
  // more than it had to be.
  void hear() {
    for (int asked = 0; asked < 3;) {
      const int before = theirs_.reports;
      until([&] { return theirs_.reports > before; });
      ++asked;
    }
  }
  template <typename Fact>
  void until(Fact fact, CallSite from = CallSite::here()) {
    baton::until(
        fact, [&] { connector_->wait(std::chrono::milliseconds(1), -1); }, NoState(), from);
  }

  Script mine_;
  Script theirs_;
  const RendezvousPlace place_{2};
  Followers followers_{
      place_, Arithmetic::kFp32, {}, ranks_checkpoint(), [this](Group& group, const Model& model) {
        Scripted connector(theirs_);
        auto follower = Follower::create(
            group, model, {.limits = kLimits, .role = "decode", .connector = &connector});
        return follower.ok() ? (*follower)->run() : follower.status();
      }};
  std::unique_ptr<Group> group_;
  std::optional<Model> model_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<RanksConnector> connector_;
  Scripted* own_ = nullptr;
};

KvLoad a_load() {
  KvLoad load;
  load.id = 5;
  load.prefill = "baton1:there";
  load.key = "k";
  load.loads_of_key = 2;
  load.tokens.assign(32, 1);
  load.blocks = {0, 1};
  return load;
}

TEST_F(KvRanks, ALoadIsHereWhenAllOfItIsHereAtAllRanks) {
  ASSERT_TRUE(connector_->start_load(a_load()).ok());
  EXPECT_EQ(mine_.started, 1);
  until([&] { return theirs_.started == 1; });
  const uint32_t all = static_cast<uint32_t>(model_->config().num_layers);
  mine_.layers = all;
  theirs_.layers = all - 1;
  hear();
  EXPECT_EQ(connector_->layers_loaded(5), 0u);
  theirs_.layers = all;
  until([&] { return connector_->layers_loaded(5) == all; });
  mine_.layers = all - 1;  // no step waits for one layer
  EXPECT_EQ(connector_->layers_loaded(5), 0u);
  EXPECT_TRUE(connector_->load_status(5).ok());
}

TEST_F(KvRanks, ALoadHasFailedWhenItHasAtOneRank) {
  ASSERT_TRUE(connector_->start_load(a_load()).ok());
  hear();
  EXPECT_TRUE(connector_->load_status(5).ok());
  theirs_.broken = true;
  until([&] { return !connector_->load_status(5).ok(); });
  EXPECT_EQ(connector_->load_status(5), absl::DataLossError("rank 1: broken"));
}

TEST_F(KvRanks, ALoadHasEndedWhenItHasAtAllRanks) {
  ASSERT_TRUE(connector_->start_load(a_load()).ok());
  EXPECT_FALSE(connector_->end_load(5));
  mine_.quiet = true;
  until([&] { return theirs_.ended > 2; });
  EXPECT_FALSE(connector_->end_load(5)) << "bytes may still arrive at rank 1";
  theirs_.quiet = true;
  until([&] { return connector_->end_load(5); });
  mine_.quiet = false;
  EXPECT_TRUE(connector_->end_load(5)) << "there is no such load any more";
  EXPECT_TRUE(absl::IsNotFound(connector_->load_status(5)));
}

TEST_F(KvRanks, AJobIsSavedWhenItIsAtAllRanks) {
  own_->job = KvJob{};
  own_->job->job = 9;
  own_->job->key = "k";
  own_->job->loads_of_key = 2;
  own_->job->tokens.assign(32, 1);
  const std::optional<KvJob> job = connector_->next_job();
  ASSERT_TRUE(job.has_value());
  until([&] { return theirs_.bound == 1; });
  const std::vector<uint32_t> blocks = {2, 3};
  for (uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(connector_->save_layer(9, layer, 0, blocks).ok());
  }
  until([&] { return theirs_.layers_saved == 2; });
  connector_->finish_job(9, absl::OkStatus());
  until([&] { return theirs_.finished == 1; });
  EXPECT_FALSE(connector_->is_saved(9));
  mine_.saved = true;
  hear();
  EXPECT_FALSE(connector_->is_saved(9)) << "rank 1 is still sending";
  theirs_.saved = true;
  until([&] { return connector_->is_saved(9); });
  EXPECT_EQ(connector_->stats().bytes_sent, 6u);
}

TEST_F(KvRanks, AJobIsWantedWhileAllRanksLoadsAre) {
  own_->job = KvJob{};
  own_->job->job = 9;
  own_->job->key = "k";
  own_->job->loads_of_key = 2;
  own_->job->tokens.assign(32, 1);
  ASSERT_TRUE(connector_->next_job().has_value());
  until([&] { return theirs_.bound == 1; });
  hear();
  EXPECT_TRUE(connector_->is_wanted(9));
  theirs_.wanted = false;
  until([&] { return !connector_->is_wanted(9); });
}

TEST_F(KvRanks, LoadsWithoutAKeyAreRefused) {
  KvLoad load = a_load();
  load.key.clear();
  EXPECT_TRUE(absl::IsInvalidArgument(connector_->start_load(load)));
}

// Nobody can ask the other ranks any more: what is under way counts as ended there.
TEST_F(KvRanks, AFailedGroupHoldsNothingBack) {
  ASSERT_TRUE(connector_->start_load(a_load()).ok());
  mine_.quiet = true;
  EXPECT_FALSE(connector_->end_load(5));
  group_->abort(absl::AbortedError("by the test"));
  EXPECT_FALSE(connector_->load_status(5).ok());
  EXPECT_TRUE(connector_->end_load(5));
  EXPECT_FALSE(connector_->start_load(a_load()).ok());
}

}  // namespace
}  // namespace baton::engine::shard
