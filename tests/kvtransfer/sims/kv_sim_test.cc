// The connector over a simulated fabric, in virtual time: many seeds of loss, repeats, reordering,
// flapping rails and cancelled loads. Whatever happens, a layer that is said to be here is here, a
// block that may be reused stays as it is, and every load and job ends. Workers that die are in
// kv_group_sim_test.cc.
#include "tests/kvtransfer/sims/kv_world.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

sim::SimOptions bad_network(std::mt19937& random) {
  sim::SimOptions sim;
  sim.seed = random();
  sim.rails = 1 + random() % 3;
  sim.link.bytes_per_second = 50e6 * (1 + random() % 20);
  sim.link.latency = microseconds(1 + random() % 50);
  sim.link.loss = random() % 2 == 0 ? 0.01 : 0;
  sim.link.duplicate = random() % 2 == 0 ? 0.02 : 0;
  sim.link.reorder = random() % 2 == 0 ? 0.05 : 0;
  sim.slice_bytes = size_t{2048} << random() % 6;
  return sim;
}

void expect_intact(World& world) {
  EXPECT_EQ(world.decode.cache().damaged(), 0u) << "a byte came to a block that was free";
  EXPECT_TRUE(world.fabric().violations().empty()) << world.fabric().violations().front();
}

TEST(KvOverSim, LoadsCompleteWhateverTheNetworkDoes) {
  const Seeds seeds(rounds_of(60, 15));
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::mt19937 random(seed);
    const KvSendMode mode = seed % 5 == 0 ? KvSendMode::kSerialized : KvSendMode::kLayerwise;
    // Every third time decode holds a part of the heads only.
    const KvLayout decode_layout = seed % 3 == 0 ? test_layout(64, 2, 3) : test_layout(64);
    World world(bad_network(random), seed, mode, test_layout(50), decode_layout);
    uint64_t bytes = 0;
    for (KvRequestId id = 1; id <= 6; ++id) {
      const uint32_t tokens = 1 + random() % 40;
      const uint32_t first = random() % tokens / kTestBlockTokens * kTestBlockTokens;
      ASSERT_TRUE(world.decode.start(id, world.prefill_address(), tokens, first).ok());
      bytes +=
          world.decode.load(id).blocks.size() * decode_layout.groups[0].fields[0].block_stride * 6;
    }
    ASSERT_TRUE(world.run(
        [&] { return world.decode.open() == 0 && world.prefill.open_jobs() == 0; }, seconds(30)));
    for (KvRequestId id = 1; id <= 6; ++id) {
      EXPECT_TRUE(world.decode.load(id).status.ok()) << world.decode.load(id).status;
      EXPECT_EQ(world.decode.load(id).verified, 6u);
      EXPECT_FALSE(world.decode.load(id).wrong);
    }
    EXPECT_EQ(world.prefill_stats().bytes_sent, bytes) << "each block exactly once per layer";
    EXPECT_EQ(world.decode_stats().bytes_loaded, bytes);
    EXPECT_EQ(world.prefill.unwanted(), 0u);
    expect_intact(world);
  }
}

// Engines that agree on nothing but the model.
TEST(KvOverSim, AnyTwoLayoutsUnderstandEachOther) {
  const Seeds seeds(rounds_of(60, 15));
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::mt19937 random(5000 + seed);
    const uint32_t sizes[] = {4, 8, 12, 16};
    const auto any_layout = [&](uint32_t first_head, uint32_t heads) {
      const KvShape shape = test_shape(64, sizes[random() % 4], first_head, heads);
      if (random() % 4 == 0) return KvLayout::transposed_keys(shape);
      return KvLayout::paged(shape, static_cast<KvLayout::Order>(random() % 2),
                             static_cast<KvLayout::Pair>(random() % 4), random() % 2 == 0);
    };
    KvLayout prefill_layout = any_layout(0, 8);
    KvLayout decode_layout = seed % 2 == 0 ? any_layout(0, 8) : any_layout(3, 4);
    if (seed % 4 == 0) {
      prefill_layout = hybrid_layout(64, 8, 4, 20);
      decode_layout = hybrid_layout(64, 12, 8, 14);
    }
    World world(bad_network(random), seed, KvSendMode::kLayerwise, prefill_layout, decode_layout);
    uint32_t block = 1;
    for (const KvGroup& group : decode_layout.groups) block = std::lcm(block, group.block_tokens);
    for (KvRequestId id = 1; id <= 3; ++id) {
      const uint32_t tokens = 1 + random() % 60;
      const uint32_t first = random() % tokens / block * block;
      ASSERT_TRUE(world.decode.start(id, world.prefill_address(), tokens, first).ok());
      if (seed % 5 == 0) world.decode.cancel(id, random() % 6);
    }
    ASSERT_TRUE(world.run(
        [&] { return world.decode.open() == 0 && world.prefill.open_jobs() == 0; }, seconds(30)));
    for (KvRequestId id = 1; id <= 3; ++id) {
      const TestLoad& load = world.decode.load(id);
      EXPECT_TRUE(load.status.ok() || absl::IsCancelled(load.status)) << load.status;
      EXPECT_TRUE(load.verified == 6 || !load.status.ok());
      EXPECT_FALSE(load.wrong);
    }
    expect_intact(world);
  }
}

TEST(KvOverSim, CancelledLoadsLeaveTheirBlocksAlone) {
  size_t cancelled = 0;
  const Seeds seeds(rounds_of(60, 15));
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::mt19937 random(1000 + seed);
    sim::SimOptions sim = bad_network(random);
    sim.link.bytes_per_second = 5e6;  // slow: most cancels meet bytes under way
    World world(sim, seed, KvSendMode::kLayerwise, test_layout(50), test_layout(64));
    for (uint32_t rail = 0; rail < sim.rails; ++rail) {
      const Time down = milliseconds(1 + random() % 10);
      if (random() % 3 == 0) world.fabric().flap(0, 1, rail, down, down + milliseconds(8));
    }
    for (KvRequestId id = 1; id <= 6; ++id) {
      ASSERT_TRUE(world.decode.start(id, world.prefill_address(), 1 + random() % 40).ok());
      if (id % 2 == 0) world.decode.cancel(id, random() % 6);
    }
    ASSERT_TRUE(world.run(
        [&] { return world.decode.open() == 0 && world.prefill.open_jobs() == 0; }, seconds(60)));
    // Long enough for whatever is still in the network to come out of it.
    world.run([] { return false; }, milliseconds(20));
    for (KvRequestId id = 1; id <= 6; ++id) {
      const TestLoad& load = world.decode.load(id);
      EXPECT_FALSE(load.wrong);
      cancelled += absl::IsCancelled(load.status);
    }
    expect_intact(world);
  }
  if (seeds.count() > 4) {
    EXPECT_GT(cancelled, seeds.count());
  }
}

// A slice whose acknowledgement is lost with its rail is counted, and travels again on another.
TEST(KvOverSim, ARailThatFailsDoesNotMakeBytesComeLate) {
  uint64_t rails_lost = 0;
  const Seeds seeds(rounds_of(100, 25));
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    std::mt19937 random(3000 + seed);
    sim::SimOptions sim = bad_network(random);
    sim.rails = 3;
    sim.link.bytes_per_second = 5e6;
    sim.slice_bytes = 2048;
    sim.retry_count = 2;  // rails fail soon
    World world(sim, seed, KvSendMode::kLayerwise, test_layout(50), test_layout(64));
    for (uint32_t rail = 0; rail < sim.rails; ++rail) {
      for (Time down = microseconds(random() % 5000); down < milliseconds(80);) {
        const Time up = down + milliseconds(3 + random() % 6);
        world.fabric().flap(0, 1, rail, down, up);
        down = up + milliseconds(2 + random() % 10);
      }
    }
    for (KvRequestId id = 1; id <= 4; ++id) {
      ASSERT_TRUE(world.decode.start(id, world.prefill_address(), 4 + random() % 8).ok());
    }
    ASSERT_TRUE(world.run(
        [&] { return world.decode.open() == 0 && world.prefill.open_jobs() == 0; }, seconds(60)));
    world.run([] { return false; }, milliseconds(20));
    for (KvRequestId id = 1; id <= 4; ++id) EXPECT_FALSE(world.decode.load(id).wrong);
    rails_lost += world.fabric().stats().rails_lost;
    expect_intact(world);
  }
  if (seeds.count() > 4) {
    EXPECT_GT(rails_lost, seeds.count());
  }
}

}  // namespace
}  // namespace baton::kvtransfer
