// Whether a store in another process is asked for what it has: not where the prompt would be
// computed before it has answered.
#include "engine/serve/cache/kv_tiers.h"
#include "engine/shard/limits.h"
#include "kvtransfer/tiers/peer_tier.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/manual_clock.h"
#include "tests/test.h"

namespace baton::engine::serve {
namespace {

using namespace std::chrono_literals;
using kvtransfer::tiers::PeerTier;
using kvtransfer::tiers::TierKey;
using kvtransfer::tiers::TierRecord;
using kvtransfer::tiers::TierShape;

constexpr size_t kBlocks = 10;

struct ScriptedStore {
  ManualClock clock;
  Time answers_in = 1ms;
  Time loads_in = 1ms;
  size_t asked = 0;
  // What a lookup of one prompt told is known for this prompt alone.
  std::atomic<bool> known = false;
};

// It has everything.
class OtherProcess final : public PeerTier {
 public:
  OtherProcess(ScriptedStore& store, const TierShape& shape)
      : store_(store), part_(shape.part_bytes, std::byte{7}) {}

  bool lookup(std::span<const TierKey>) override {
    if (store_.known) return true;
    if (!std::exchange(pending_, true)) {
      ++store_.asked;
      return false;
    }
    store_.clock.advance(store_.answers_in);
    store_.known = true;
    pending_ = false;
    return true;
  }
  bool contains(const TierKey&) override { return store_.known; }
  bool wants(const TierKey&) override { return false; }
  bool put(const TierRecord&) override { return false; }
  void flush() override {}
  std::optional<Pin> pin(const TierKey& key) override {
    Pin pin;
    pin.header.key = key;
    return pin;
  }
  void read(std::span<Pin* const> pins, uint32_t part, Time, const Done& done) override {
    if (part == 0) store_.clock.advance(store_.loads_in);
    for (size_t i = 0; i < pins.size(); ++i) done(i, part_);
  }
  uint64_t corrupt() const override { return 0; }
  uint64_t silences() const override { return 0; }
  std::string explain() const override { return "another process"; }

 private:
  ScriptedStore& store_;
  const std::vector<std::byte> part_;
  bool pending_ = false;
};

// One prompt after the other, in front of that store.
class PromptsOfStore {
 public:
  explicit PromptsOfStore(LoadWhen when = LoadWhen::kQuicker)
      : memory_(*shard::KvMemory::make(test_model(), 2 * kBlocks, nullptr)), blocks_(2 * kBlocks) {
    KvTierOptions options;
    options.load = when;
    options.peer = [this](const TierShape& shape, const std::function<void()>&) {
      return std::make_unique<OtherProcess>(store_, shape);
    };
    tiers_ = *KvTiers::open(options, test_model(), nullptr, memory_.cache(), blocks_, store_.clock);
    tiers_->note_computed(0, kBlocks * kBlockTokens, 10ms);
  }
  ScriptedStore& store() { return store_; }
  KvTiers& tiers() { return *tiers_; }

  // Whether it was loaded.
  bool run(bool others_run_meanwhile = false) {
    store_.known = false;
    std::vector<int32_t> tokens(kBlocks * kBlockTokens, static_cast<int32_t>(number_ % 200));
    tokens[0] = static_cast<int32_t>(number_++ / 200);
    std::vector<BlockHash> chain;
    extend_chain(tokens, kBlockTokens, model_root(test_model().fingerprint()), &chain);
    std::optional<size_t> found = tiers_->worth_loading(chain, 0);
    if (!found.has_value()) {
      if (others_run_meanwhile) tiers_->note_step();
      found = tiers_->worth_loading(chain, 0);
    }
    if (found != kBlocks) {
      EXPECT_EQ(found, 0u);
      return false;
    }
    load(tokens);
    return true;
  }

 private:
  void load(const std::vector<int32_t>& tokens) {
    kvtransfer::KvLoad load;
    load.id = number_;
    load.tokens = tokens;
    load.timeout = 1h;
    EXPECT_TRUE(blocks_.allocate(kBlocks, &load.blocks));
    std::vector<uint32_t> blocks = load.blocks;
    EXPECT_TRUE(tiers_->start_load(std::move(load)).ok());
    const auto layers = static_cast<uint32_t>(memory_.cache().geometry().layers);
    const auto wait = [&] { tiers_->wait(1ms, -1); };
    until(
        [&] {
          return tiers_->layers_loaded(number_) == layers || !tiers_->load_status(number_).ok();
        },
        wait);
    EXPECT_TRUE(tiers_->load_status(number_).ok());
    until([&] { return tiers_->end_load(number_); }, wait);
    blocks_.release(blocks);
  }

  ScriptedStore store_;
  shard::KvMemory memory_;
  BlockManager blocks_;
  std::unique_ptr<KvTiers> tiers_;
  uint64_t number_ = 0;
};

TEST(AskingOthers, IsDoneWhereTheyAnswerBeforeThePromptWouldBeComputed) {
  PromptsOfStore prompts;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(prompts.run());
  EXPECT_EQ(prompts.store().asked, 100u);
}

// The answer and the load take 1 ms each: of computing that would take 1.5 ms, either alone is
// quicker and both are not.
TEST(AskingOthers, IsNotDoneWhereComputingIsQuickerThanTheirAnswerAndTheLoad) {
  PromptsOfStore prompts;
  for (int i = 0; i < 30; ++i) {
    prompts.tiers().note_computed(0, kBlocks * kBlockTokens, 1500us);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(prompts.run());  // to know it
  size_t loaded = 0;
  for (int i = 0; i < 640; ++i) loaded += prompts.run();
  EXPECT_EQ(loaded, 10u);
  EXPECT_EQ(prompts.store().asked, 3u + loaded);
}

TEST(AskingOthers, BeginsAgainWhenTheyAnswerSoonerAndEndsWhenTheyDoNot) {
  PromptsOfStore prompts;
  for (const bool soon : {true, false, true, false}) {
    prompts.store().answers_in = soon ? 1ms : 1s;
    for (int i = 0; i < 300; ++i) prompts.run();  // it is noticed, late where nobody is asked
    prompts.store().asked = 0;
    for (int i = 0; i < 128; ++i) prompts.run();
    EXPECT_EQ(prompts.store().asked, soon ? 128u : 2u);
  }
}

// What the store takes to answer is not known then.
TEST(AskingOthers, WhatComesWhileOthersAreComputedSaysNothing) {
  PromptsOfStore prompts;
  prompts.store().answers_in = 1s;
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(prompts.run(true));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(prompts.run());
  EXPECT_FALSE(prompts.run());
}

TEST(AskingOthers, IsAlwaysDoneWhereKvIsAlwaysLoaded) {
  PromptsOfStore prompts(LoadWhen::kAlways);
  prompts.store().answers_in = 1s;
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(prompts.run());
}

TEST(AskingOthers, IsNeverDoneWhereNothingIsLoaded) {
  PromptsOfStore prompts(LoadWhen::kNever);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(prompts.run());
  EXPECT_EQ(prompts.store().asked, 0u);
}

}  // namespace
}  // namespace baton::engine::serve
