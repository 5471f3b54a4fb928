// The connector over a simulated fabric, in virtual time: many seeds of loss, repeats, reordering,
// flapping rails and cancelled loads. Whatever happens, a layer that is said to be here is here, a
// block that may be reused stays as it is, and every load and job ends. Workers that die are in
// kv_group_sim_test.cc.
#include "tests/kvtransfer/kv_groups.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

KvLayout any_layout(std::mt19937& random, uint32_t first_head, uint32_t heads) {
  const uint32_t sizes[] = {4, 8, 12, 16};
  const KvShape shape = test_shape(64, sizes[random() % 4], first_head, heads);
  if (random() % 4 == 0) return KvLayout::transposed_keys(shape);
  return KvLayout::paged(shape, static_cast<KvLayout::Order>(random() % 2),
                         static_cast<KvLayout::Pair>(random() % 4), random() % 2 == 0);
}

// Engines that have one layout, of which decode may hold a part of the heads only; and engines that
// agree on nothing but the model.
TEST(KvOverSim, LoadsCompleteWhateverTheNetworkDoes) {
  with_seeds(rounds_of(120, 30), [](uint32_t seed) {
    std::mt19937 random(seed);
    const bool dense = seed % 2 == 0, cancels = !dense && seed % 5 == 0;
    KvLayout prefill = test_layout(50);
    KvLayout decode = seed % 3 == 0 ? test_layout(64, 2, 3) : test_layout(64);
    if (!dense) {
      prefill = any_layout(random, 0, 8);
      decode = seed % 3 == 0 ? any_layout(random, 3, 4) : any_layout(random, 0, 8);
    }
    if (seed % 8 == 1) {
      prefill = hybrid_layout(64, 8, 4, 20);
      decode = hybrid_layout(64, 12, 8, 14);
    }
    const KvSendMode mode =
        dense && seed % 5 == 0 ? KvSendMode::kSerialized : KvSendMode::kLayerwise;
    Groups world(bad_network(random), seed, prefill, decode, mode);
    uint32_t block = 1;
    for (const KvGroup& group : decode.groups) block = std::lcm(block, group.block_tokens);
    uint64_t bytes = 0;
    for (KvRequestId id = 1; id <= 6; ++id) {
      const uint32_t tokens = 1 + random() % 40;
      const uint32_t first = random() % tokens / block * block;
      ASSERT_TRUE(world.decode().start(id, world.address(), tokens, first).ok());
      if (cancels) world.decode().cancel(id, random() % 6);
      bytes += world.decode().load(id).blocks.size() * decode.groups[0].fields[0].block_stride * 6;
    }
    ASSERT_TRUE(world.run_to_end());
    for (KvRequestId id = 1; id <= 6; ++id) {
      const TestLoad& load = world.decode().load(id);
      EXPECT_TRUE(load.status.ok() || (cancels && absl::IsCancelled(load.status))) << load.status;
      EXPECT_TRUE(load.verified == 6 || !load.status.ok());
      EXPECT_FALSE(load.wrong);
    }
    if (dense) {
      EXPECT_EQ(world.connector().stats().bytes_sent, bytes) << "each block once per layer";
      EXPECT_EQ(world.decode_connector().stats().bytes_loaded, bytes);
      EXPECT_EQ(world.prefill().unwanted(), 0u);
    }
    world.expect_intact();
  });
}

// A slice whose acknowledgement is lost with its rail is counted, and travels again on another.
// Half of the loads are cancelled meanwhile; the network is slow: most have bytes under way.
TEST(KvOverSim, RailsThatFailAndCancelsMakeNoBytesComeLate) {
  uint64_t rails_lost = 0, cancelled = 0;
  const uint64_t seeds = with_seeds(rounds_of(120, 30), [&](uint32_t seed) {
    std::mt19937 random(3000 + seed);
    sim::SimOptions sim = bad_network(random);
    sim.link.bytes_per_second = 5e6;
    if (seed % 2 == 0) {  // rails fail soon
      sim.rails = 3;
      sim.slice_bytes = 2048;
      sim.retry_count = 2;
    }
    Groups world(sim, seed, test_layout(50), test_layout(64));
    for (uint32_t rail = 0; rail < sim.rails; ++rail) {
      for (Time down = microseconds(random() % 5000); down < milliseconds(80);) {
        const Time up = down + milliseconds(3 + random() % 6);
        world.fabric().flap(0, 1, rail, down, up);
        down = up + milliseconds(2 + random() % 10);
      }
    }
    for (KvRequestId id = 1; id <= 6; ++id) {
      ASSERT_TRUE(world.decode().start(id, world.address(), 1 + random() % 40).ok());
      if (id % 2 == 0) world.decode().cancel(id, random() % 6);
    }
    ASSERT_TRUE(world.run_to_end(seconds(60)));
    // Long enough for whatever is still in the network to come out of it.
    world.pass(milliseconds(20));
    for (KvRequestId id = 1; id <= 6; ++id) {
      EXPECT_FALSE(world.decode().load(id).wrong);
      cancelled += absl::IsCancelled(world.decode().load(id).status);
    }
    rails_lost += world.fabric().stats().rails_lost;
    world.expect_intact();
  });
  if (seeds > 4) {
    EXPECT_GT(cancelled, seeds);
    EXPECT_GT(rails_lost, seeds);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
