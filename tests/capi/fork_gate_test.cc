// Who waits for whom while a process forks: the fork for those who make or end something, and
// others for the fork.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "capi/forks.h"
#include "tests/sanitized.h"
#include "tests/sleeping.h"

namespace baton::capi {
namespace {

std::atomic<bool> inside{false};  // somebody is
std::atomic<bool> forked{false};  // a fork is over, as its parent sees it
std::atomic<bool> beside{false};  // it was of a process in which somebody was inside

// Before the gate's, so that they are called after it, and before it when the fork is over.
__attribute__((constructor(101))) void watch_forks() {
  pthread_atfork([] { beside = inside.load(); }, [] { forked = true; }, nullptr);
}

int end_of(pid_t child) {
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkGate, AForkWaitsForWhoIsInsideAndOthersForIt) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own threads and locks";
  std::optional<ForkWaits> me(std::in_place);
  inside = true;
  forked = false;
  std::atomic<pid_t> forking{0}, entering{0};
  std::atomic<bool> entered{false}, too_early{false};
  std::chrono::steady_clock::duration took{};
  std::thread forks_now([&] {
    const auto begin = std::chrono::steady_clock::now();
    forking = gettid();
    const pid_t child = fork();
    if (child == 0) _exit(7);
    took = std::chrono::steady_clock::now() - begin;
    EXPECT_EQ(end_of(child), 7);
  });
  while (forking == 0 || (!sleeps(forking) && !forked)) std::this_thread::yield();
  std::thread enters([&] {
    entering = gettid();
    const ForkWaits it;
    too_early = !forked;
    entered = true;
  });
  while (entering == 0 || (!sleeps(entering) && !entered)) std::this_thread::yield();
  inside = false;
  me.reset();
  forks_now.join();
  enters.join();
  EXPECT_FALSE(too_early) << "others would keep a fork waiting";
  // It waits no longer than a second, and nobody knows how slow this machine is.
  EXPECT_TRUE(!beside || took >= std::chrono::seconds(1));
}

TEST(ForkGate, AForkWaitsNotForEverAndItsChildIsFree) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own threads and locks";
  const ForkWaits me;
  const uint32_t before = forks();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const ForkWaits its;
    _exit(forks() == before + 1 ? 7 : 8);
  }
  EXPECT_EQ(end_of(child), 7);
  EXPECT_EQ(forks(), before);
}

}  // namespace
}  // namespace baton::capi
