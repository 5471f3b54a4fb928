// A prefill worker that is stopped, or only slow: what decode makes of its silence, in virtual
// time.
#include "tests/fails_with.h"
#include "tests/kvtransfer/kv_groups.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

struct KvSilence : testing::Test {
  absl::Status start(KvRequestId id, uint32_t tokens, Time silence = seconds(1)) {
    return world.decode().start(
        {.id = id, .prefill = world.address(), .timeout = seconds(60), .silence = silence}, tokens);
  }
  // It has come so far and no further.
  void start_two_layers(Time silence = seconds(1)) {
    world.prefill().stop_before_layer(2);
    ASSERT_TRUE(start(1, 40, silence).ok());
    ASSERT_TRUE(world.run([&] { return world.decode().load(1).verified == 2; }, seconds(1)));
  }
  void go_on_to_the_end(KvRequestId id) {
    world.stop_prefill(false);
    world.stop_decode(false);
    world.prefill().stop_before_layer(UINT32_MAX);
    ASSERT_TRUE(world.run_to_end(seconds(2)));
    EXPECT_EQ(world.decode().load(id).verified, 6u) << world.decode().load(id).status;
    EXPECT_EQ(world.decode().cache().damaged(), 0u);
  }
  Groups world{sim::SimOptions(), 1, test_layout(50), test_layout(64)};
};

// Promise(kv): A stopped prefill worker costs a load its limit of silence, not its timeout | probes
//   are answered by a thread of their own
TEST_F(KvSilence, AStoppedPrefillCostsItsLimitAndNotTheLoadsTimeout) {
  start_two_layers();
  world.stop_prefill(true);
  const Time stopped = world.now();
  ASSERT_TRUE(world.run([&] { return !world.decode().load(1).status.ok(); }, seconds(2)));
  EXPECT_GE(world.now() - stopped, milliseconds(700));  // it was heard of a quarter before
  EXPECT_THAT(world.decode().load(1).status,
              fails_with(Code::kUnavailable, {"prefill-0", "is silent for 1 s"}));
  // Its blocks are not free: it may go on and write to them.
  EXPECT_EQ(world.decode().open(), 1u);
  // Whoever asks it meanwhile is told at once.
  ASSERT_TRUE(start(2, 20).ok());
  ASSERT_TRUE(world.run([&] { return !world.decode().load(2).status.ok(); }, milliseconds(10)));
  EXPECT_TRUE(absl::IsUnavailable(world.decode().load(2).status)) << world.decode().load(2).status;
  // It goes on, and hears that nobody waits for it any more.
  world.stop_prefill(false);
  world.prefill().stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(world.run_to_end(seconds(2)));
  EXPECT_EQ(world.decode().cache().damaged(), 0u);
  ASSERT_TRUE(start(3, 40).ok());
  go_on_to_the_end(3);
}

TEST_F(KvSilence, WithoutALimitALoadWaitsUntilItsTimeout) {
  start_two_layers(Time{});
  world.stop_prefill(true);
  EXPECT_FALSE(world.run([&] { return !world.decode().load(1).status.ok(); }, seconds(5)));
  go_on_to_the_end(1);
}

TEST_F(KvSilence, ASlowPeerIsNotSilent) {
  start_two_layers();
  // Nothing is computed for many times the limit; between two looks of its connector passes half.
  for (int i = 0; i < 20; ++i) {
    world.stop_prefill(true);
    world.pass(milliseconds(500));
    world.stop_prefill(false);
    world.pass(milliseconds(1));
  }
  go_on_to_the_end(1);
}

TEST_F(KvSilence, ACallerThatDidNotPollBlamesNoPeer) {
  start_two_layers();
  // Its own engine computes for ten seconds; prefill is stopped for the first nine.
  world.stop_prefill(true);
  world.pass_without_decode(seconds(9));
  world.stop_prefill(false);
  world.pass_without_decode(seconds(1));
  go_on_to_the_end(1);
}

}  // namespace
}  // namespace baton::kvtransfer
