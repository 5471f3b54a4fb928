// Thousands of seeded fault schedules: whatever the network does, every transfer ends, what is done
// is exact, after its end no byte of a transfer moves, and none after its target has heard that it
// is there: from then on the target uses the memory for something else.
//
// tests/seeds.h says which ones run.
#include <iostream>

#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/sim/schedule.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

constexpr uint64_t kPerShard = kSanitized ? 25 : 250;
constexpr uint64_t kEnough = 200;
// All of it is in one thread, where the thread sanitizer finds little and takes longest.
constexpr int kShards = kThreadSanitized ? 6 : 20;

// The schedules did what they are for.
void expect_all_of_it(const Seen& seen, uint64_t schedules) {
  EXPECT_GT(seen.done, schedules * Schedule::kTransfers / 2);
  const std::pair<const char*, uint64_t> counts[] = {
      {"cancelled", seen.cancelled},
      {"past their deadline", seen.late},
      {"blocks reused", seen.reused},
      {"parted", seen.parted},
      {"killed", seen.killed},
      {"times frozen", seen.frozen},
      {"crashed and started anew", seen.crashed},
      {"left and started anew", seen.left},
      {"new peers that took something", seen.new_peers},
      {"receipts", seen.receipts},
      {"slices that went again", seen.slices_moved},
      {"peers lost", seen.peers_lost},
      {"peers resumed", seen.peers_resumed},
      {"packets lost", seen.fabric.lost},
      {"packets repeated", seen.fabric.duplicated},
      {"packets reordered", seen.fabric.reordered},
      {"timeouts", seen.fabric.timeouts},
      {"rails lost", seen.fabric.rails_lost}};
  std::cout << seen.done << " done";
  for (const auto& [what, count] : counts) {
    EXPECT_GT(count, 0u) << what;
    std::cout << ", " << count << " " << what;
  }
  std::cout << "\n";
}

class FaultSchedules : public testing::TestWithParam<int> {};

TEST_P(FaultSchedules, EveryTransferEndsExactly) {
  const Seeds seeds(kPerShard * kShards);
  // Neighbours differ in kind, so a shard has a stretch of them.
  const uint64_t per_shard = (seeds.count() + kShards - 1) / kShards;
  const uint64_t begin = seeds.begin + static_cast<uint64_t>(GetParam()) * per_shard;
  const uint64_t end = std::min(begin + per_shard, seeds.end);
  Seen sum;
  for (uint64_t seed = begin; seed < end; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    auto schedule = std::make_unique<Schedule>(seed);
    schedule->run(sum);
    if (HasFailure()) return;
  }
  // A few dozen need not reach them all.
  if (end >= begin + kEnough) expect_all_of_it(sum, end - begin);
}

INSTANTIATE_TEST_SUITE_P(Seeds, FaultSchedules, testing::Range(0, kShards));

}  // namespace
}  // namespace baton::sim
