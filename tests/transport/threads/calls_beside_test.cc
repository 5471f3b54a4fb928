// Calls on threads beside: as many at once as there are threads, each told of once.
#include "transport/base/threads/calls_beside.h"

#include <semaphore>

#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton::base {
namespace {

using Calls = CallsBeside<int, std::string>;

struct CallsBesideTest : testing::Test {
  // One that waits for go.
  bool begin(int key) {
    return calls->begin(key, [this, key] {
      ++begun;
      began.release();
      go.acquire();
      return std::to_string(key);
    });
  }
  std::counting_semaphore<> began{0}, go{0}, ended{0};
  std::atomic<int> begun{0};
  std::unique_ptr<Calls> calls = std::make_unique<Calls>([this] { ended.release(); });
};

TEST_F(CallsBesideTest, OneMoreThanThereAreThreadsWaitsForOne) {
  const int most = Calls::kMostThreads;
  for (int key = 0; key <= most; ++key) ASSERT_TRUE(begin(key));
  for (int i = 0; i < most; ++i) began.acquire();
  EXPECT_EQ(begun, most);
  EXPECT_EQ(calls->size(), size_t(most) + 1);
  EXPECT_TRUE(calls->take_ended().empty());
  go.release();
  began.acquire();
  ended.acquire();
  const Calls::Ended first = calls->take_ended();
  ASSERT_EQ(first.size(), 1U);
  EXPECT_EQ(first[0].second, std::to_string(first[0].first));
  EXPECT_FALSE(calls->contains(first[0].first));
  go.release(most);
  for (int i = 0; i < most; ++i) ended.acquire();
  EXPECT_EQ(calls->take_ended().size(), size_t(most));
  EXPECT_EQ(calls->size(), 0U);
}

TEST_F(CallsBesideTest, ItsEndWaitsForThoseThatHaveBegunAlone) {
  const int most = Calls::kMostThreads;
  for (int key = 0; key <= most; ++key) ASSERT_TRUE(begin(key));
  for (int i = 0; i < most; ++i) began.acquire();
  std::thread end([&] { calls->close(); });
  go.release(most + 1);  // the last may have begun before the end
  end.join();
  EXPECT_GE(begun, most);
  EXPECT_EQ(calls->take_ended().size(), size_t(begun));
}

TEST_F(CallsBesideTest, DestructionInAForkedChildReturnsAtOnce) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's threads do not live on in a forked child";
  // Its thread is in the midst of telling, with the lock that a child finds taken.
  calls = std::make_unique<Calls>([this] {
    ended.release();
    go.acquire();
  });
  ASSERT_TRUE(calls->begin(1, [] { return std::string(); }));
  ended.acquire();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    calls.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child hung or died";
  go.release();
}

}  // namespace
}  // namespace baton::base
