// A prefill worker that is stopped, or only slow: what decode makes of its silence, in virtual
// time.
#include "tests/kvtransfer/kv_pair.h"
#include "tests/kvtransfer/sims/kv_world.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

KvLoad load_of(const World& world, KvRequestId id, Time silence = seconds(1)) {
  return {.id = id, .prefill = world.prefill_address(), .timeout = seconds(60), .silence = silence};
}

World quiet_world() {
  return World({}, 1, KvSendMode::kLayerwise, test_layout(50), test_layout(64));
}

bool all_is_over(const World& world) {
  return world.decode.open() == 0 && world.prefill.open_jobs() == 0;
}

// Promise(kv): A stopped prefill worker costs a load its limit of silence, not its timeout | probes
//   are answered by a thread of their own
TEST(KvSilence, AStoppedPrefillCostsItsLimitAndNotTheLoadsTimeout) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  world.stop(kPrefillNode, true);
  const Time stopped = world.now();
  ASSERT_TRUE(world.run([&] { return !world.decode.load(1).status.ok(); }, seconds(2)));
  EXPECT_GE(world.now() - stopped, milliseconds(700));  // it was heard of a quarter before
  const absl::Status why = world.decode.load(1).status;
  EXPECT_TRUE(absl::IsUnavailable(why)) << why;
  EXPECT_THAT(std::string(why.message()), HasSubstr("prefill-0"));
  EXPECT_THAT(std::string(why.message()), HasSubstr("is silent for 1 s"));
  // Its blocks are not free: it may go on and write to them.
  EXPECT_EQ(world.decode.open(), 1u);
  // Whoever asks it meanwhile is told at once.
  ASSERT_TRUE(world.decode.start(load_of(world, 2), 20).ok());
  ASSERT_TRUE(world.run([&] { return !world.decode.load(2).status.ok(); }, milliseconds(10)));
  EXPECT_TRUE(absl::IsUnavailable(world.decode.load(2).status)) << world.decode.load(2).status;
  // It goes on, and hears that nobody waits for it any more.
  world.stop(kPrefillNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.cache().damaged(), 0u);
  ASSERT_TRUE(world.decode.start(load_of(world, 3), 40).ok());
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(3).verified, 6u) << world.decode.load(3).status;
  EXPECT_EQ(world.decode.cache().damaged(), 0u);
}

TEST(KvSilence, WithoutALimitALoadWaitsUntilItsTimeout) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1, Time{}), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  world.stop(kPrefillNode, true);
  EXPECT_FALSE(world.run([&] { return !world.decode.load(1).status.ok(); }, seconds(5)));
  world.stop(kPrefillNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_TRUE(world.decode.load(1).status.ok()) << world.decode.load(1).status;
}

TEST(KvSilence, ASlowPeerIsNotSilent) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  // Nothing is computed for many times the limit; between two looks of its connector passes half.
  for (int i = 0; i < 20; ++i) {
    world.stop(kPrefillNode, true);
    world.run([] { return false; }, milliseconds(500));
    world.stop(kPrefillNode, false);
    world.run([] { return false; }, milliseconds(1));
  }
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(1).verified, 6u) << world.decode.load(1).status;
}

TEST(KvSilence, ACallerThatDidNotPollBlamesNoPeer) {
  World world = quiet_world();
  world.prefill.stop_before_layer(2);
  ASSERT_TRUE(world.decode.start(load_of(world, 1), 40).ok());
  ASSERT_TRUE(world.run([&] { return world.decode.load(1).verified == 2; }, seconds(1)));
  // Its own engine computes for ten seconds; prefill is stopped for the first nine.
  world.stop(kDecodeNode, true);
  world.stop(kPrefillNode, true);
  world.run([] { return false; }, seconds(9));
  world.stop(kPrefillNode, false);
  world.run([] { return false; }, seconds(1));
  world.stop(kDecodeNode, false);
  world.prefill.stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run([&] { return all_is_over(world); }, seconds(2)));
  EXPECT_EQ(world.decode.load(1).verified, 6u) << world.decode.load(1).status;
}

}  // namespace
}  // namespace baton::kvtransfer
