// The small parts that everything else is made of: numbers, times, children.
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/base/durations.h"
#include "transport/base/quantile.h"
#include "transport/base/splitmix.h"
#include "transport/clock.h"

namespace baton {
namespace {

// As the authors' implementation in C has it.
TEST(Splitmix, IsTheGeneratorThatEverybodyKnows) {
  uint64_t state = 0;
  EXPECT_EQ(base::splitmix_next(state), 0xe220a8397b1dcdafu);
  EXPECT_EQ(base::splitmix_next(state), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(base::splitmix(0), 0xe220a8397b1dcdafu);
}

TEST(Quantile, NearestRankAndInterpolated) {
  EXPECT_EQ(base::quantile({}, 0.5), 0);
  EXPECT_EQ(base::interpolated_quantile({}, 0.5), 0);
  EXPECT_EQ(base::quantile({4, 1, 3, 2, 5}, 0.5), 3);
  EXPECT_EQ(base::quantile({1, 2, 3, 4}, 0.99), 4);
  EXPECT_EQ(base::median({7}), 7);
  EXPECT_DOUBLE_EQ(base::interpolated_quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(base::interpolated_quantile({0, 10}, 0.99), 9.9);
}

TEST(Deadline, IsNeverWhereTheSpanReachesPastTheEndOfTime) {
  constexpr Time kNow = std::chrono::seconds(5);
  EXPECT_EQ(base::deadline_after(kNow, std::chrono::seconds(2)), std::chrono::seconds(7));
  EXPECT_EQ(base::deadline_after(kNow, Time::zero()), kNow);
  EXPECT_EQ(base::deadline_after(kNow, std::chrono::seconds(-2)), std::chrono::seconds(3));
  EXPECT_EQ(base::deadline_after(kNow, kNever), kNever);
  EXPECT_EQ(base::deadline_after(kNow, kNever - kNow), kNever);
  EXPECT_EQ(base::deadline_after(kNow, kNever - kNow - Time(1)), kNever - Time(1));
  EXPECT_EQ(base::deadline_after(Time::zero(), kNever), kNever);
}

TEST(Timespec, SplitsSeconds) {
  const timespec time = base::to_timespec(std::chrono::milliseconds(2500));
  EXPECT_EQ(time.tv_sec, 2);
  EXPECT_EQ(time.tv_nsec, 500'000'000);
}

// A child holds the write end of a pipe; its parent, a child of ours, ends at once.
TEST(Child, DoesNotOutliveItsParent) {
  int ends[2];
  ASSERT_EQ(0, pipe2(ends, O_CLOEXEC));
  const pid_t parent = base::fork_child();
  if (parent == 0) {
    if (base::fork_child() == 0) {
      while (true) pause();
    }
    _exit(0);
  }
  close(ends[1]);
  EXPECT_EQ(waitpid(parent, nullptr, 0), parent);
  pollfd closed{.fd = ends[0], .events = 0, .revents = 0};
  EXPECT_EQ(poll(&closed, 1, 60'000), 1) << "the grandchild holds the pipe still";
  EXPECT_TRUE(closed.revents & POLLHUP);
  close(ends[0]);
}

}  // namespace
}  // namespace baton
