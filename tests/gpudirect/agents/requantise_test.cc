// bf16 and fp32 into fp8 between agents whose caches are a device's, on one side or both: every
// byte as the definition has it, whatever the two layouts; what is refused, and what is ended
// midway.
#include "tests/gpudirect/agents/device_cache.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class RequantisingAgents : public DeviceAgents {
 protected:
  void SetUp() override { staging_bytes_ = 128 << 10; }  // slots of 32 KiB: many chunks
  void begin(gpudirect::FakeOptions options = {}) { start(std::move(options), true); }
  std::unique_ptr<DeviceCache> cache(Agent& agent, const KvLayout& layout, bool device,
                                     int ordinal = 0) {
    return std::make_unique<DeviceCache>(agent, *driver_, layout, of(device), ordinal);
  }
  // A transfer of alpha's: between its cache, in memory of a device where `near`, and beta's.
  void expect_requantised(Op op, bool near, bool far, const RequantisedPair& pair, uint32_t seed) {
    const bool writes = op == Op::kWrite;
    const auto source = cache(writes ? *a_ : *b_, pair.source, writes ? near : far);
    const auto target = cache(writes ? *b_ : *a_, pair.target, writes ? far : near);
    source->fill(seed);
    introduce(*a_, *b_);
    const auto plan =
        AgentKvPlan::make_requantising(*a_, op, (writes ? source : target)->place, "beta",
                                       (writes ? target : source)->place, pair.blocks.share);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(plan->requantises());
    const CacheBytes before = source->bytes();
    const CacheBytes want =
        requantised(pair.source, before, pair.target, target->bytes(), pair.blocks);
    const auto id = plan->make_transfer(*a_, request_of(op, pair.blocks), "all is there");
    ASSERT_TRUE(id.ok()) << id.status();
    {
      // A peer's memory is mapped by the progress that first copies there, which takes a
      // millisecond.
      std::optional<FakeDriver::ProgressThread> nothing_blocks;
      if (std::string_view(GetParam().provider) != "shm") nothing_blocks.emplace();
      const absl::Status status = run(*id);
      ASSERT_TRUE(status.ok()) << status;
    }
    EXPECT_TRUE(target->bytes() == want);
    EXPECT_TRUE(source->bytes() == before);
    std::vector<AgentMessage> heard;
    run_agents(*a_, *b_, [&] { return !(heard = b_->messages()).empty(); });
    EXPECT_EQ(heard[0].payload, "all is there");
    EXPECT_TRUE(a_->release(*id).ok());
  }

  // Prefill's two layers of 4 heads in bf16 are alpha's, decode's in larger blocks are beta's.
  struct Pair {
    std::unique_ptr<DeviceCache> prefill, decode;
    RequantisedPair of;
    CacheBytes want() const {
      return requantised(of.source, prefill->bytes(), of.target, decode->bytes(), of.blocks);
    }
  };
  Pair large_pair(bool prefill = true, bool decode = false) {
    KvShape shape{.layers = 2,
                  .blocks = 40,
                  .block_tokens = 16,
                  .total_heads = 4,
                  .heads = 4,
                  .head_size = 32};
    Pair pair;
    pair.of.source = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
    shape.blocks = 20;
    shape.block_tokens = 32;
    pair.of.target = fp8_layout(shape, KvLayout::Order::kHnd, 1);
    pair.of.blocks = {.from = std::vector<int64_t>(40), .to = std::vector<int64_t>(20)};
    std::iota(pair.of.blocks.from.rbegin(), pair.of.blocks.from.rend(), 0);
    std::iota(pair.of.blocks.to.begin(), pair.of.blocks.to.end(), 0);
    pair.of.blocks.tokens = {0, 640};
    pair.of.blocks.layers = {0, 2};
    pair.prefill = cache(*a_, pair.of.source, prefill);
    pair.decode = cache(*b_, pair.of.target, decode);
    pair.prefill->fill(7);
    introduce(*a_, *b_);
    return pair;
  }
  absl::StatusOr<AgentKvPlan> push(const Pair& pair) {
    return AgentKvPlan::make_requantising(*a_, Op::kWrite, pair.prefill->place, "beta",
                                          pair.decode->place);
  }
  bool running(AgentTransferId id) { return *a_->state(id) == AgentTransferState::kRunning; }
};

TEST_P(RequantisingAgents, RandomPairsAreWhatTheReferenceSays) {
  begin();
  if (IsSkipped()) return;
  const auto pairs = static_cast<uint32_t>(rounds_of(12, 3));
  for (uint32_t seed = 0; seed < pairs; ++seed) {
    for (const auto& [near, far] : {std::pair{true, false}, {true, true}, {false, true}}) {
      for (const Op op : {Op::kWrite, Op::kRead}) {
        SCOPED_TRACE(testing::Message()
                     << seed << (op == Op::kWrite ? " write " : " read ") << near << far);
        expect_requantised(op, near, far, random_pair(seed), seed);
      }
    }
  }
}

// The caches are on two devices of one machine, and a plan of either agent's converts on its own.
TEST_P(RequantisingAgents, EachPlanConvertsOnTheDeviceOfItsCache) {
  begin({.devices = 2});
  if (IsSkipped()) return;
  const RequantisedPair of = random_pair(2);
  for (const int device : {1, 0}) {
    const auto source = cache(*a_, of.source, true, device);
    const auto target = cache(*b_, of.target, true, 1 - device);
    source->fill(4);
    introduce(*a_, *b_);
    const auto plan = AgentKvPlan::make_requantising(*a_, Op::kWrite, source->place, "beta",
                                                     target->place, of.blocks.share);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const CacheBytes want =
        requantised(of.source, source->bytes(), of.target, target->bytes(), of.blocks);
    const auto id = plan->make_transfer(*a_, request_of(Op::kWrite, of.blocks));
    ASSERT_TRUE(id.ok()) << id.status();
    ASSERT_TRUE(run(*id).ok()) << a_->status(*id);
    EXPECT_TRUE(target->bytes() == want);
    EXPECT_TRUE(a_->release(*id).ok());
  }
}

// More boxes in a chunk than a kernel is given at a time.
TEST_P(RequantisingAgents, ChunksOfManySmallBlocks) {
  begin();
  if (IsSkipped()) return;
  KvShape shape{
      .layers = 1, .blocks = 1500, .block_tokens = 1, .total_heads = 1, .heads = 1, .head_size = 6};
  RequantisedPair of;
  of.source = KvLayout::paged(shape, KvLayout::Order::kNhd, KvLayout::Pair::kSplit, true);
  of.target = fp8_layout(shape, KvLayout::Order::kNhd, 1);
  std::mt19937 random(1);
  of.blocks.from = some_blocks(random, 1500, 1400);
  of.blocks.to = some_blocks(random, 1500, 1400);
  of.blocks.tokens = {0, 1400};
  of.blocks.layers = {0, 1};
  expect_requantised(Op::kWrite, true, false, of, 1);
}

TEST_P(RequantisingAgents, SeveralAtOnceShareTheSlots) {
  begin();
  if (IsSkipped()) return;
  {
    const Pair pair = large_pair();
    const auto plan = push(pair);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const CacheBytes want = pair.want();
    std::vector<AgentTransferId> ids;
    for (int i = 0; i < 5; ++i) {
      ids.push_back(*plan->make_transfer(*a_, request_of(Op::kWrite, pair.of.blocks)));
      ASSERT_TRUE(a_->post(ids.back()).ok());
    }
    for (const AgentTransferId id : ids) {
      run_agents(*a_, *b_, [&] { return !running(id); });
      EXPECT_TRUE(a_->status(id).ok()) << a_->status(id);
    }
    EXPECT_TRUE(pair.decode->bytes() == want);
    // Again, of other values.
    pair.prefill->fill(8);
    const CacheBytes again = pair.want();
    ASSERT_TRUE(run(ids[0]).ok()) << a_->status(ids[0]);
    EXPECT_TRUE(pair.decode->bytes() == again);
    for (const AgentTransferId id : ids) EXPECT_TRUE(a_->release(id).ok());
  }
}

// Aborted in the middle: when the fence lets the cache go no kernel is at it.
TEST_P(RequantisingAgents, ReleaseFencesWhatAKernelConverts) {
  const int rounds = rounds_of(12, 4);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    begin({.seed = static_cast<uint64_t>(round + 1)});
    if (IsSkipped()) return;
    {
      const Pair pair = large_pair(true, round % 2 == 0);
      const auto plan = push(pair);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const auto id = plan->make_transfer(*a_, request_of(Op::kWrite, pair.of.blocks));
      ASSERT_TRUE(a_->post(*id).ok());
      EXPECT_TRUE(absl::IsAlreadyExists(a_->post(*id)) || !running(*id));
      for (int i = 0; i < round * 3; ++i) {
        a_->progress();
        b_->progress();
      }
      ASSERT_TRUE(a_->abort(*id).ok());
      run_agents(*a_, *b_, [&] { return !running(*id); });
      EXPECT_TRUE(*a_->local_free(*id));
      const absl::Status status = a_->status(*id);
      EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
      ASSERT_TRUE(a_->release(*id).ok());
      const CacheBytes there = pair.decode->bytes();
      pair.prefill->fill(99);
      settle();
      EXPECT_TRUE(pair.decode->bytes() == there) << "bytes came after the release";
      // All slots are free again.
      const CacheBytes want = pair.want();
      const auto next = plan->make_transfer(*a_, request_of(Op::kWrite, pair.of.blocks));
      ASSERT_TRUE(run(*next).ok()) << a_->status(*next);
      EXPECT_TRUE(pair.decode->bytes() == want);
    }
    DeviceAgents::TearDown();
  }
}

TEST_P(RequantisingAgents, AnAgentThatEndsMidwayLeavesNothing) {
  for (const int rounds : {0, 1, 3, 10}) {
    SCOPED_TRACE(rounds);
    begin({.seed = static_cast<uint64_t>(rounds + 1)});
    if (IsSkipped()) return;
    {
      const Pair pair = large_pair();
      const auto plan = push(pair);
      ASSERT_TRUE(plan.ok()) << plan.status();
      const auto id = plan->make_transfer(*a_, request_of(Op::kWrite, pair.of.blocks));
      ASSERT_TRUE(a_->post(*id).ok());
      for (int i = 0; i < rounds; ++i) {
        a_->progress();
        b_->progress();
      }
      a_.reset();
      pair.prefill->leave_agent();  // free, and no kernel is at it
    }
    DeviceAgents::TearDown();
  }
}

TEST_P(RequantisingAgents, ALostDeviceEndsThemAndTheHostsGoOn) {
  begin();
  if (IsSkipped()) return;
  {
    const Pair pair = large_pair(), hosts = large_pair(false, false);
    const auto plan = push(pair);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto id = plan->make_transfer(*a_, request_of(Op::kWrite, pair.of.blocks));
    ASSERT_TRUE(a_->post(*id).ok());
    driver_->fake().lose();
    run_agents(*a_, *b_, [&] { return !running(*id); });
    // Bytes that were converted before may all have arrived.
    EXPECT_TRUE(absl::IsAborted(a_->status(*id))) << a_->status(*id);
    EXPECT_TRUE(a_->release(*id).ok());
    const auto plain = push(hosts);
    ASSERT_TRUE(plain.ok()) << plain.status();
    const CacheBytes want = hosts.want();
    const auto next = plain->make_transfer(*a_, request_of(Op::kWrite, hosts.of.blocks));
    ASSERT_TRUE(run(*next).ok()) << a_->status(*next);
    EXPECT_TRUE(hosts.decode->bytes() == want);
  }
  a_.reset();
  b_.reset();
  EXPECT_THAT(driver_->fake().violations(), testing::IsEmpty());
  driver_.reset();
}

INSTANTIATE_TEST_SUITE_P(Ways, RequantisingAgents, testing::ValuesIn(kDeviceWays),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace baton::kvtransfer
