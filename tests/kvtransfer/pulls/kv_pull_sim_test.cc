// Loads that pull, over a simulated fabric, in virtual time, and leases that run out. No block that
// prefill may use again is taken for KV, and none is held for ever. What pulls and pushes have in
// common is in sims/kv_group_sim_test.cc.
#include "tests/kvtransfer/kv_groups.h"
#include "tests/test.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;

// Computing takes many leases; each is renewed.
TEST(KvPullsOverSim, LayersAreReadBeforeTheJobIsFinishedHoweverLongThatTakes) {
  Groups groups(3, 2, 1, 100e6, milliseconds(10));
  for (size_t rank : {0, 1}) groups.prefill(rank).stop_before_layer(5);
  groups.load(1, 12);
  const TestLoad& load = groups.decode().load(1);
  ASSERT_TRUE(groups.run([&] { return load.verified == 5; }, seconds(5)));
  EXPECT_TRUE(absl::IsUnavailable(groups.decode_connector().load_payload(1).status()));
  groups.pass(milliseconds(200));
  EXPECT_EQ(load.verified, 5u);
  EXPECT_FALSE(load.wrong);
  EXPECT_TRUE(load.status.ok()) << load.status;
  for (size_t rank : {0, 1}) groups.prefill(rank).stop_before_layer(UINT32_MAX);
  ASSERT_TRUE(groups.run_to_end());
  groups.expect_complete(1);
}

// Decode asks for 10 ms, or for much more, and prefill grants 10 ms.
class KvPullLeases : public ::testing::TestWithParam<Time> {};
INSTANTIATE_TEST_SUITE_P(Asked, KvPullLeases, ::testing::Values(milliseconds(10), seconds(5)));

TEST_P(KvPullLeases, AnUnrenewedLeaseLosesItsBlocks) {
  Groups groups(5, 1, 1, 100e6, GetParam(), milliseconds(10));
  groups.prefill(0).stop_before_layer(3);
  groups.load(1, 40);
  ASSERT_TRUE(groups.run([&] { return groups.decode(0).load(1).verified == 3; }, seconds(5)));
  groups.pass(milliseconds(50));
  EXPECT_EQ(groups.prefill(0).open_jobs(), 1u) << "it was renewed";
  groups.pass_without_decode(milliseconds(5));
  EXPECT_EQ(groups.prefill(0).open_jobs(), 1u);
  groups.pass_without_decode(milliseconds(10));
  EXPECT_EQ(groups.prefill(0).open_jobs(), 0u) << "its lease is over";
  EXPECT_EQ(groups.prefill(0).unwanted(), 1u);
  ASSERT_TRUE(groups.run_to_end());
  const TestLoad& load = groups.decode(0).load(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(load.status)) << load.status;
  EXPECT_THAT(std::string(load.status.message()), HasSubstr("did not renew its lease"));
  EXPECT_FALSE(load.wrong);
  EXPECT_EQ(load.wrongly_kept, 0u);
  groups.expect_all_free();
  groups.expect_intact();
}

// The network is away for longer than the lease: prefill uses the blocks again, and reads that were
// under way, and are repeated when it is back, bring what is in them then.
// Promise(kv): A pull never uses what prefill may have reused | a read counts if it ended before a
//   confirmed lease did
TEST_P(KvPullLeases, WhatIsReadAfterTheLeaseIsNotTakenForData) {
  size_t lost = 0, complete = 0;
  const uint64_t seeds = with_seeds(rounds_of(80, 20), [&](uint32_t seed) {
    Groups groups(seed + 300, 1, 1, 20e6, GetParam(), milliseconds(3));
    const Time down = microseconds(200 + groups.random()() % 15'000);
    const Time up = down + milliseconds(3 + groups.random()() % 8);
    for (uint32_t rail = 0; rail < 2; ++rail) {
      if (rail < groups.rails()) groups.fabric().flap(0, 1, rail, down, up);
    }
    for (KvRequestId id = 1; id <= 3; ++id) groups.load(id, 20 + groups.random()() % 40);
    ASSERT_TRUE(groups.run_to_end());
    groups.pass(milliseconds(20));
    for (KvRequestId id = 1; id <= 3; ++id) {
      const TestLoad& load = groups.decode(0).load(id);
      EXPECT_FALSE(load.wrong) << "bytes of a block that prefill had used again";
      EXPECT_TRUE(load.verified == 6 || !load.status.ok());
      EXPECT_EQ(load.wrongly_kept, 0u);
      ++(load.status.ok() ? complete : lost);
    }
    groups.expect_all_free();
    groups.expect_intact();
  });
  if (seeds > 4) {
    EXPECT_GT(lost, seeds / 4);
    EXPECT_GT(complete, seeds / 4);
  }
}

// The engine gives up, but decode may be reading: the blocks are not free before it says that it is
// not, or before its lease is over.
TEST(KvPullsOverSim, AJobThatFailedHoldsItsBlocksUntilDecodeHasLetGo) {
  for (const bool silent : {false, true}) {
    SCOPED_TRACE(silent);
    Groups groups(6, 1, 1, 100e6, milliseconds(20));
    groups.prefill(0).stop_before_layer(3);
    groups.load(1, 40);
    ASSERT_TRUE(groups.run([&] { return groups.decode(0).load(1).verified == 3; }, seconds(5)));
    groups.prefill(0).refuse(absl::InternalError("by the test"));
    groups.pass_without_decode(milliseconds(5));
    EXPECT_EQ(groups.prefill(0).open_jobs(), 1u) << "decode has not let go of them";
    if (silent) {
      groups.pass_without_decode(milliseconds(25));
    } else {
      ASSERT_TRUE(groups.run_to_end(milliseconds(10))) << "before the lease is over";
    }
    EXPECT_EQ(groups.prefill(0).open_jobs(), 0u);
    ASSERT_TRUE(groups.run_to_end());
    EXPECT_TRUE(absl::IsInternal(groups.decode(0).load(1).status));
    EXPECT_FALSE(groups.decode(0).load(1).wrong);
  }
}

// Decode gives up in the middle of reading: prefill hears of it when no read is open any more.
TEST(KvPullsOverSim, ACancelEndsTheReadsFirst) {
  size_t cancelled = 0;
  const uint64_t seeds = with_seeds(rounds_of(20, 5), [&](uint32_t seed) {
    Groups groups(seed + 400, 1, 1, 2e6, seconds(10));
    groups.load(1, 60);
    ASSERT_TRUE(groups.run([&] { return groups.decode(0).load(1).verified >= 1; }, seconds(30)));
    groups.decode(0).cancel(1, 0);
    const Time begin = groups.now();
    while (groups.prefill(0).open_jobs() > 0 && groups.now() - begin < seconds(1)) {
      groups.decode(0).step();
      const bool reading = groups.decode(0).open() > 0;
      groups.prefill(0).step();
      EXPECT_FALSE(reading && groups.prefill(0).open_jobs() == 0) << "freed below a read";
      groups.fabric().run_for(microseconds(1));
    }
    ASSERT_TRUE(groups.run_to_end());
    groups.expect_all_free();
    groups.expect_intact();
    cancelled += absl::IsCancelled(groups.decode(0).load(1).status);
  });
  if (seeds > 4) {
    EXPECT_GT(cancelled, seeds / 2);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
