// Every task runs exactly once, on any number of threads, time after time.
#include "engine/kernels/compute_pool.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::engine {
namespace {

TEST(ComputePool, RunsEveryTaskOnceOverManyKernels) {
  for (const int threads : {1, 2, 5}) {
    ComputePool pool(threads);
    EXPECT_EQ(pool.size(), threads);
    for (int64_t tasks : {0, 1, 2, 3, 17, 100}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
        std::atomic<bool> thread_ids_fit{true};
        pool.parallel_for(tasks, [&](int64_t task, int thread) {
          runs[static_cast<size_t>(task)].fetch_add(1);
          if (thread < 0 || thread >= threads) thread_ids_fit = false;
        });
        for (const auto& count : runs) ASSERT_EQ(count.load(), 1);
        ASSERT_TRUE(thread_ids_fit.load());
      }
    }
  }
}

TEST(ComputePool, PlainWritesOfATaskAreSeenByTheCaller) {
  ComputePool pool(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<int> values(64, 0);
    pool.parallel_for(64, [&](int64_t task, int) { values[size_t(task)] = int(task) + repeat; });
    for (int i = 0; i < 64; ++i) ASSERT_EQ(values[size_t(i)], i + repeat);
  }
}

TEST(ComputePool, OneThreadRunsInlineAndInOrder) {
  ComputePool pool(1);
  std::vector<int64_t> order;
  pool.parallel_for(5, [&](int64_t task, int thread) {
    EXPECT_EQ(thread, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

// Wherever a worker is when the end is rung: what it has seen by then is all that it goes by. One
// that slept would hang here.
TEST(PoolBell, NoThreadSleepsThroughTheEnd) {
  for (int rings = 0; rings < 3; ++rings) {
    PoolBell bell;
    for (int i = 0; i < rings; ++i) bell.ring();
    const int seen = bell.look();
    EXPECT_FALSE(PoolBell::is_end(seen));
    bell.end();
    bell.wait(seen);
    EXPECT_TRUE(PoolBell::is_end(bell.look()));
    bell.ring();
    EXPECT_TRUE(PoolBell::is_end(bell.look())) << "work does not take the end away";
  }
}

TEST(PoolBell, NoThreadSleepsThroughWork) {
  PoolBell bell;
  const int seen = bell.look();
  bell.ring();
  bell.wait(seen);
  EXPECT_NE(bell.look(), seen);
  EXPECT_FALSE(PoolBell::is_end(bell.look()));
}

// Workers that start, run, spin and sleep.
TEST(ComputePool, EndsWhateverItsThreadsAreAt) {
  for (int i = 0; i < 300; ++i) {
    ComputePool pool(2);
    if (i % 3 == 0) continue;
    std::atomic<bool> both{false};
    until([&] { return both.load(); },  // the other thread is up
          [&] { pool.parallel_for(2, [&](int64_t, int thread) { both = both || thread == 1; }); });
    pool.parallel_for(2, [](int64_t, int) {});
    if (i % 3 == 1) continue;
    for (std::atomic<int> passed{0}; passed.fetch_add(1) < i % 50;) {
    }
  }
}

}  // namespace
}  // namespace baton::engine
