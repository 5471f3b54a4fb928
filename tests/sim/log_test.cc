// What a worker tells its log of rails that are lost: which, why, and what goes on over the others.
#include "tests/captured_log.h"
#include "tests/sim/cluster.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr size_t kBytes = 32 << 20;

SimOptions two_rails() {
  return {.rails = 2, .link = {.bytes_per_second = 1e9}, .slice_bytes = 64 << 10};
}

TEST(RailLog, TellsWhichRailWasLostAndWhatGoesOn) {
  SimCluster cluster(two_rails(), kBytes);
  auto [peer, back] = cluster.connect(0, 1);
  const CapturedLog log(base::LogLevel::kWarning);
  const Time start = cluster.fabric.clock().now();
  cluster.fabric.flap(0, 1, 0, start + milliseconds(2), start + milliseconds(40));
  const auto id = must(cluster.worker(0).submit(cluster.request(Op::kWrite, 0, peer, 1, kBytes)));
  ASSERT_TRUE(cluster.run_to_end(0, id));
  const WorkerStats stats = cluster.worker(0).stats();
  ASSERT_EQ(stats.rails_lost, 1u);
  ASSERT_GT(stats.slices_moved, 0u);
  EXPECT_THAT(
      log.lines,
      Contains(AllOf(StartsWith("warning: node-0: lost a rail to node-1: "), HasSubstr("(sim"),
                     HasSubstr(absl::StrCat("; moves ", stats.slices_moved,
                                            " slices to the 1 remaining connection")))));
}

TEST(RailLog, ClosedRailsAreNotLogged) {
  SimCluster cluster(two_rails(), 1 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  const CapturedLog log(base::LogLevel::kWarning);
  cluster.worker(0).disconnect(peer, Time::zero()).IgnoreError();
  cluster.fabric.run_for(milliseconds(20));
  EXPECT_THAT(log.lines, Not(Contains(StartsWith("warning: node-0: lost"))));
  EXPECT_EQ(cluster.worker(0).stats().rails_lost, 0u);
}

TEST(RailLog, LosingTheLastRailLogsPeerDown) {
  SimCluster cluster({.link = {.bytes_per_second = 1e9}}, 1 << 20);
  auto [peer, back] = cluster.connect(0, 1);
  const CapturedLog log(base::LogLevel::kInfo);
  cluster.stop(1);
  const auto id = must(cluster.worker(0).notify(peer, "is anybody there?"));
  ASSERT_TRUE(cluster.run_to_end(0, id, std::chrono::seconds(60)));
  EXPECT_THAT(log.lines, Contains(StartsWith("node-0: peer down: node-1: ")));
  EXPECT_THAT(log.lines, Not(Contains(HasSubstr("lost a rail"))));
}

}  // namespace
}  // namespace baton::sim
