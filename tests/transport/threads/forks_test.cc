// A fork waits for what a child must not find half done, whatever others do meanwhile.
#include "transport/base/threads/forks.h"

#include <pthread.h>

#include <semaphore>

#include "tests/sanitized.h"
#include "tests/test.h"
#include "transport/base/log.h"
#include "transport/internal/worker/progress_lock.h"

namespace baton {
namespace {

using base::ForkWaits;
using base::LogLevel;
using base::MadeHere;
using base::set_log_sink;
using base::write_log;

std::atomic<std::counting_semaphore<>*> fork_listener{nullptr};  // that a thread forks

struct Forks : testing::Test {
  void SetUp() override {
    if (kSanitized) GTEST_SKIP() << "a sanitizer's own locks are taken in a forked child";
    // Of handlers that come before a fork the last registered is called first.
    static const int at_fork = pthread_atfork(
        [] {
          if (auto* const whom = fork_listener.load()) whom->release();
        },
        nullptr, nullptr);
    ASSERT_EQ(at_fork, 0);
    set_log_sink([](LogLevel, std::string_view) {});
  }
  void TearDown() override { set_log_sink(nullptr); }
  // What `in_child` returns.
  static int in_a_child(const std::function<int()>& in_child) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(in_child());
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }
  // Forks while another thread is in the midst of `hold(rest)`. In rest(what) there comes to be a
  // thread that forks, and then what() is done. The child must find that all of it was.
  using What = std::function<void()>;
  static void expect_waits(const std::function<void(const std::function<void(What)>&)>& hold) {
    for (int round = 0; round < 3; ++round) {
      std::counting_semaphore<> forking(0), inside(0);
      std::atomic<bool> over{false};
      std::thread other([&] {
        hold([&](const What& what) {
          inside.release();
          forking.acquire();
          // Nobody needs this time: a fork that does not wait is over by then.
          std::this_thread::sleep_for(std::chrono::milliseconds(30));
          what();
          over = true;
        });
      });
      inside.acquire();
      fork_listener = &forking;
      EXPECT_EQ(in_a_child([&] { return over ? 0 : 1; }), 0) << "it did not wait";
      fork_listener = nullptr;
      other.join();
    }
  }
};

TEST_F(Forks, WaitForObjectsBeingCreated) {
  internal::ProgressLock lock;
  expect_waits([&](const auto& rest) {
    const ForkWaits making(ForkWaits::kMaking);
    rest([&] {
      // While a fork waits this may be taken again, and what comes later.
      const ForkWaits again(ForkWaits::kMaking);
      const std::lock_guard held(lock);
      write_log(LogLevel::kError, "a line");
    });
  });
}

TEST_F(Forks, WaitForAWorkersLock) {
  internal::ProgressLock lock;
  expect_waits([&](const auto& rest) {
    const std::lock_guard held(lock);
    rest([] { write_log(LogLevel::kError, "a line"); });
  });
}

TEST_F(Forks, WaitForALineOfTheLog) {
  expect_waits([](const auto& rest) {
    set_log_sink([&](LogLevel, std::string_view) { rest([] {}); });
    write_log(LogLevel::kError, "a line");
    set_log_sink([](LogLevel, std::string_view) {});
  });
}

TEST_F(Forks, LeaveAllOpen) {
  internal::ProgressLock lock;
  const MadeHere here;
  const auto all_open = [&] {
    const ForkWaits making(ForkWaits::kMaking);
    const std::lock_guard held(lock);
    const ForkWaits moment(ForkWaits::kMoment);
    return true;
  };
  // A child's child too, and who forks may be in the midst of something himself.
  const ForkWaits making(ForkWaits::kMaking);
  EXPECT_EQ(in_a_child([&] {
              const MadeHere of_child;
              const int child = in_a_child(
                  [&] { return all_open() && here.elsewhere() && of_child.elsewhere() ? 0 : 1; });
              return all_open() && here.elsewhere() && !of_child.elsewhere() ? child : 1;
            }),
            0);
  EXPECT_TRUE(all_open());
  EXPECT_FALSE(here.elsewhere());
}

}  // namespace
}  // namespace baton
