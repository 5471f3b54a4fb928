// Workers over the simulated fabric: exact times, determinism, rails that flap, peers that die.
#include "tests/sim/fabric/fabric.h"

#include "tests/sim/cluster.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::IsEmpty;

TEST(SimFabric, ATransferEndsAtBandwidthPlusTwoLatencies) {
  SimCluster cluster({.link = {.bytes_per_second = 1e9, .latency = microseconds(5)}}, 4 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  for (Op op : {Op::kWrite, Op::kRead}) {
    for (size_t bytes : {1000u, 100'000u, 3'000'000u}) {
      const Time start = cluster.fabric.clock().now();
      auto id = must(cluster.worker(0).submit(cluster.request(op, 0, peer, 1, bytes)));
      ASSERT_TRUE(cluster.run_to_end(0, id));
      EXPECT_TRUE(cluster.worker(0).status(id).ok());
      EXPECT_EQ(cluster.fabric.clock().now() - start, Time(bytes) + 2 * microseconds(5)) << bytes;
      ASSERT_TRUE(cluster.worker(0).release(id).ok());
    }
  }
  EXPECT_THAT(cluster.fabric.violations(), IsEmpty());
}

// Some traffic in bad conditions; returns what identifies the run.
uint64_t digest_of(uint64_t seed) {
  SimCluster cluster({.seed = seed,
                      .rails = 2,
                      .link = {.loss = 0.05, .duplicate = 0.05, .reorder = 0.3},
                      .slice_bytes = 16 << 10},
                     1 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  cluster.fabric.flap(0, 1, 1, milliseconds(2), milliseconds(20));
  std::vector<TransferId> ids;
  for (int i = 0; i < 10; ++i) {
    auto id = cluster.worker(0).submit(
        cluster.request(i % 2 ? Op::kRead : Op::kWrite, 0, peer, 1, 1 << 20));
    if (id.ok()) ids.push_back(*id);
  }
  for (TransferId id : ids) EXPECT_TRUE(cluster.run_to_end(0, id));
  EXPECT_THAT(cluster.fabric.violations(), IsEmpty());
  return cluster.fabric.digest();
}

TEST(SimFabric, EverythingFollowsFromTheSeed) {
  EXPECT_EQ(digest_of(1), digest_of(1));
  EXPECT_EQ(digest_of(2), digest_of(2));
  EXPECT_NE(digest_of(1), digest_of(2));
}

TEST(SimFabric, AFlappingRailLosesNothingAndComesBack) {
  SimCluster cluster({.rails = 2,
                      .link = {.bytes_per_second = 1e9, .latency = microseconds(1)},
                      .slice_bytes = 64 << 10},
                     32 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  for (size_t i = 0; i < (32u << 20); ++i) cluster.members[0].memory[i] = std::byte(i * 7 >> 3);
  const Time start = cluster.fabric.clock().now();
  cluster.fabric.flap(0, 1, 0, start + milliseconds(2), start + milliseconds(40));
  auto id = must(cluster.worker(0).submit(cluster.request(Op::kWrite, 0, peer, 1, 32 << 20)));
  ASSERT_TRUE(cluster.run_to_end(0, id));
  EXPECT_TRUE(cluster.worker(0).status(id).ok());
  EXPECT_EQ(cluster.members[0].memory, cluster.members[1].memory);
  EXPECT_GT(cluster.worker(0).stats().slices_moved, 0u);
  EXPECT_EQ(cluster.fabric.stats().rails_made, 2u);

  // The rail is back and carries its half.
  cluster.fabric.run_for(milliseconds(20));
  EXPECT_EQ(cluster.fabric.stats().rails_made, 3u);
  const Time again = cluster.fabric.clock().now();
  auto second = must(cluster.worker(0).submit(cluster.request(Op::kWrite, 0, peer, 1, 32 << 20)));
  ASSERT_TRUE(cluster.run_to_end(0, second));
  const double took = static_cast<double>((cluster.fabric.clock().now() - again).count());
  EXPECT_NEAR(took, (32 << 20) / 2.0, 0.02 * (32 << 20));
  EXPECT_THAT(cluster.fabric.violations(), IsEmpty());
}

TEST(SimFabric, ADeadPeerFailsEveryOpenTransferInBoundedTime) {
  SimCluster cluster({.nodes = 3, .rails = 2, .link = {.bytes_per_second = 1e9}}, 8 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  auto [other, other_back] = cluster.connect(0, 2);
  std::vector<TransferId> ids;
  for (int i = 0; i < 20; ++i) {
    ids.push_back(*cluster.worker(0).submit(
        cluster.request(i % 2 ? Op::kRead : Op::kWrite, 0, peer, 1, 8 << 20)));
  }
  const Time death = cluster.fabric.clock().now() + milliseconds(10);
  cluster.fabric.kill(1, death);
  for (TransferId id : ids) {
    ASSERT_TRUE(cluster.run_to_end(0, id, seconds(10)));
    if (*cluster.worker(0).state(id) != TransferState::kDone) {
      EXPECT_EQ(cluster.worker(0).status(id).code(), absl::StatusCode::kUnavailable);
    }
  }
  // Two rounds of retries: a slice may move to the second rail when the first has given up.
  EXPECT_LE(cluster.fabric.clock().now(),
            death + 2 * 8 * microseconds(502) + milliseconds(1) + seconds(5));  // peer.redial_ms
  EXPECT_EQ(cluster.worker(0).peer_state(peer), PeerState::kDown);
  auto id = must(cluster.worker(0).submit(cluster.request(Op::kRead, 0, other, 2, 8 << 20)));
  ASSERT_TRUE(cluster.run_to_end(0, id));
  EXPECT_TRUE(cluster.worker(0).status(id).ok());
  EXPECT_THAT(cluster.fabric.violations(), IsEmpty());
}

}  // namespace
}  // namespace baton::sim
