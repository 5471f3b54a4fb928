// Who waits for the lock of progress gets it from a thread that takes it over and over.
#include "transport/internal/worker/progress_lock.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::internal {
namespace {

constexpr std::chrono::hours kLong{1};

// Promise(sleep): A thread that waits for a worker's lock gets it from a busy progress thread | the
//   progress thread yields to waiters
TEST(ProgressLock, YieldsToAWaiter) {
  ProgressLock lock(kLong);
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> got{false};
    lock.lock();
    std::thread other([&] {
      const std::lock_guard held(lock);
      got = true;
    });
    until([&] { return lock.wanted(); });
    EXPECT_FALSE(lock.try_lock());
    EXPECT_FALSE(got);
    lock.unlock();
    lock.give_way();
    const std::lock_guard held(lock);  // behind it
    EXPECT_TRUE(got);
    other.join();
    EXPECT_FALSE(lock.wanted());
  }
}

TEST(ProgressLock, YieldsOnlyToAWaiterAndNotForLong) {
  ProgressLock lock(kLong);
  lock.give_way();
  ProgressLock brief(std::chrono::milliseconds(2));
  brief.lock();
  std::thread other([&] { const std::lock_guard held(brief); });
  until([&] { return brief.wanted(); });
  brief.give_way();  // though the other one cannot have it
  EXPECT_TRUE(brief.wanted());
  brief.unlock();
  other.join();
}

}  // namespace
}  // namespace baton::internal
