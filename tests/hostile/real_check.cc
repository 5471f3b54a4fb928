// Each transfer of a schedule against what the two sides have written down.
#include "tests/hostile/real_check.h"

#include "tests/test.h"

namespace baton {

size_t check_real_item(const RealSchedule& schedule, size_t number, size_t dead) {
  const RealItem& item = schedule.shared->items[number];
  const RealPlan& plan = schedule.plan[number];
  const auto& sides = schedule.shared->sides;
  if (item.submitted == 0) return 0;
  SCOPED_TRACE(
      testing::Message() << "transfer " << number << " from side " << plan.from << ": "
                         << item.words << "; parted " << item.parted << ", frozen " << item.frozen
                         << "; killed " << dead << ", left " << schedule.shared->sides[0].left
                         << schedule.shared->sides[1].left << ", down "
                         << schedule.shared->sides[0].down << schedule.shared->sides[1].down
                         << ", cuts " << schedule.shared->sides[0].cuts << "+"
                         << schedule.shared->sides[1].cuts << ", resumed "
                         << schedule.shared->sides[0].resumed << "+"
                         << schedule.shared->sides[1].resumed);
  const char* now = schedule.destination(number);
  EXPECT_EQ(item.wrong, 0) << "announced, but not there";
  EXPECT_LE(item.notified, 1);
  EXPECT_LE(item.counter, 1u);
  const bool target_lives = plan.target() != dead;
  const bool gone = dead < 2 || sides[0].left != 0 || sides[1].left != 0 ||
                    (!schedule.network.survives && (sides[0].down != 0 || sides[1].down != 0));
  if ((item.notified != 0 || item.parted != 0) && target_lives) {
    EXPECT_EQ(std::count(now, now + kRealBlock, kRealReused), static_cast<ptrdiff_t>(kRealBlock))
        << "landed in memory that had been reused";
  } else if (item.frozen != 0 && target_lives) {
    EXPECT_TRUE(std::equal(now, now + kRealBlock, item.at_end)) << "bytes moved after the end";
  }
  if (plan.from == dead) return 0;
  EXPECT_EQ(item.ended, 1);
  if (item.code == 0) {
    for (size_t at = 0; target_lives && item.notified == 0 && item.parted == 0 && at < plan.bytes;
         ++at) {
      EXPECT_EQ(now[at], real_byte(schedule.seed, number, at)) << at;
      if (testing::Test::HasFailure()) return 0;
    }
    if (plan.op == Op::kWrite && target_lives) {
      EXPECT_EQ(item.counter, 1u);
      EXPECT_EQ(item.notified, 1);
    }
    return 1;
  }
  const auto code = static_cast<absl::StatusCode>(item.code.load());
  const bool asked = (code == absl::StatusCode::kCancelled && item.cancelled != 0) ||
                     (code == absl::StatusCode::kDeadlineExceeded && plan.timeout_ms >= 0);
  EXPECT_TRUE(asked || (gone && code == absl::StatusCode::kUnavailable))
      << "nobody asked for this end";
  return 0;
}

}  // namespace baton
