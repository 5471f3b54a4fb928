// Nobody sleeps through what it waits for, whoever else drives the worker; and nobody who has
// nothing to do is kept awake.
#include <sys/syscall.h>

#include "tests/no_descriptors.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/transport/scripted_peers.h"
#include "tests/transport/stub_provider.h"
#include "tests/until.h"
#include "transport/progress_thread.h"

namespace {
thread_local std::function<void()> before_write;  // NOLINT: once, then gone
}

// Stands in for the C library's: the only way into the middle of a wake-up.
extern "C" ssize_t write(int fd, const void* data, size_t size) {
  if (before_write) std::exchange(before_write, nullptr)();
  return syscall(SYS_write, fd, data, size);
}

namespace baton {
namespace {

const Time kPatience = until_gives_up();

bool readable(int fd) {
  pollfd waiting{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&waiting, 1, 0) == 1;
}

// One of them makes progress, and finds that there is nothing to do: the others must look too.
TEST(Sleep, ManySleepersWakeOnOutsideChanges) {
  StubWorker stub;
  Worker& worker = *stub.worker;
  std::atomic<bool> changed{false};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 4; ++i) {
    sleepers.emplace_back(
        [&] { EXPECT_TRUE(worker.wait_until([&] { return changed.load(); }, kPatience).ok()); });
  }
  uint64_t events = 0;
  EXPECT_EQ(read(worker.event_fd(), &events, sizeof events), 8);
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // most likely they sleep
  changed = true;
  const Time begin = Clock::steady().now();
  worker.wake();
  for (std::thread& each : sleepers) each.join();
  EXPECT_LT(Clock::steady().now() - begin, kPatience / 2) << "woken by the timeout";
  EXPECT_TRUE(readable(worker.event_fd()));
  until([&] { return worker.arm(); }, [&] { worker.progress(); });
  EXPECT_FALSE(readable(worker.wait_fd()));
  worker.wake();
  EXPECT_TRUE(readable(worker.wait_fd()));
  worker.progress();  // another thread's
  EXPECT_TRUE(readable(worker.wait_fd())) << "whose wake-up another one took";
}

TEST(Sleep, OnTheDescriptorSurvivesAnothersProgress) {
  StubWorker stub;
  Worker& worker = *stub.worker;
  until([&] { return !worker.progress() && worker.arm(); });
  ASSERT_FALSE(readable(worker.wait_fd()));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(worker.progress()) << "another thread's, with no work";
  EXPECT_FALSE(readable(worker.wait_fd())) << "woken for nothing";
  ASSERT_TRUE(worker.notify_detached(stub.peer, "news").ok());
  EXPECT_TRUE(readable(worker.wait_fd())) << "disarmed by another's progress()";
}

TEST(Sleep, OnTheDescriptorHearsOfWorkThatAnotherDid) {
  StubWorker stub;
  Worker& worker = *stub.worker;
  const TransferId id = *worker.notify(stub.peer, "news");
  until([&] { return !worker.progress() && worker.arm(); });
  ASSERT_TRUE(worker.cancel(id).ok());
  EXPECT_TRUE(worker.progress()) << "another thread's: ends the transfer, uses the wake-up";
  EXPECT_EQ(*worker.state(id), TransferState::kCancelled);
  EXPECT_TRUE(readable(worker.wait_fd()));
  until([&] { return !worker.progress() && worker.arm(); });
  EXPECT_FALSE(readable(worker.wait_fd())) << "heard, and armed again";
}

// A thread submits. Before it has woken the one that is about to sleep, a third takes the
// submission up, on the way to something else.
using SleepOfScripted = ScriptedPeers;

TEST_F(SleepOfScripted, WaitsForWhatDeregisteringTookUp) {
  const auto [peer, rail] = up(caller(1, 1));
  std::array<char, 64> bytes{};
  const auto region =
      worker_->register_memory(bytes.data(), bytes.size(), Access::kRemoteRead).value();
  ASSERT_TRUE(worker_->notify_detached(peer, "news").ok());
  ASSERT_TRUE(worker_->deregister_memory(region).ok());
  ASSERT_TRUE(rail->held.empty());
  EXPECT_FALSE(worker_->arm()) << "asleep, with something to send";
  EXPECT_TRUE(worker_->progress());
  EXPECT_EQ(rail->held.size(), 1u);
  EXPECT_TRUE(worker_->arm());
}

TEST_F(SleepOfScripted, WaitsForWhatPartingWithAnotherTookUp) {
  const auto [peer, rail] = up(caller(1, 1));
  const PeerId gone = up(caller(2, 2)).first;
  ASSERT_TRUE(worker_->notify_detached(peer, "news").ok());
  worker_->begin_disconnect(gone, Time::zero());
  ASSERT_TRUE(rail->held.empty());
  EXPECT_FALSE(worker_->arm()) << "asleep, with something to send";
  turn();
  EXPECT_EQ(rail->held.size(), 1u);
}

// The sleeper of a test: waits for a transfer, in its own thread.
struct Waiter {
  explicit Waiter(StubWorker& stub)
      : id(*stub.worker->notify(stub.peer, "never delivered")),
        thread([this, &stub] { result = stub.worker->wait(id, kPatience); }) {}
  const TransferId id;
  absl::Status result;
  std::thread thread;
};

// Promise(sleep): A sleeping thread misses no event, whichever thread drives the worker | each
//   sleeper has its own bell
TEST(Sleep, InAWaitSurvivesAnothersProgress) {
  StubWorker stub;
  Waiter waiter(stub);
  until([&] { return stub.armed != 0; });
  stub.worker->progress();
  ASSERT_TRUE(stub.worker->cancel(waiter.id).ok());
  waiter.thread.join();
  EXPECT_EQ(waiter.result.code(), absl::StatusCode::kCancelled) << waiter.result;
}

TEST(Sleep, InAWaitHearsOfAnEndThatAnotherBrought) {
  StubWorker stub;
  Waiter first(stub);
  Waiter second(stub);
  until([&] { return stub.armed >= 2; });
  stub.worker->disconnect(stub.peer, Time::zero()).IgnoreError();
  first.thread.join();
  second.thread.join();
  EXPECT_EQ(first.result.code(), absl::StatusCode::kUnavailable) << first.result;
  EXPECT_EQ(second.result.code(), absl::StatusCode::kUnavailable) << second.result;
}

// A condition that takes what it waited for, as next_notification() does, holds once.
TEST(Sleep, AWaitEndsWithTheFirstWordThatItIsOver) {
  const Time short_wait = patient(std::chrono::seconds(2));
  StubWorker stub;
  for (int i = 0; i < 5; ++i) {
    const int before = stub.armed;
    bool taken = false;  // at the look before the sleep
    const auto once = [&] { return stub.armed != before && !std::exchange(taken, true); };
    EXPECT_TRUE(stub.worker->wait_until(once, short_wait).ok());
  }
  ProgressThread thread(*stub.worker, {.spin = Time::zero()});
  until([&] { return stub.armed != 0; });
  for (int look = 1; look < 6; ++look) {
    int looks = 0;
    EXPECT_TRUE(stub.worker->wait_until([&] { return ++looks == look; }, short_wait).ok()) << look;
    EXPECT_EQ(looks, look);
  }
}

// A thread that found no descriptor for its bell cannot be woken: it looks by itself, also for its
// end.
TEST(Sleep, EndsWithAProgressThreadForWhichThereWasNoDescriptor) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer wants descriptors of its own";
  StubWorker stub;
  const NoDescriptors none;
  ProgressThread thread(*stub.worker, {.spin = Time::zero()});
  until([&] { return stub.armed != 0; });
}

// When a wait sleeps for the first time is a matter of chance: that nothing happens for 20 us.
TEST(Sleep, SleepingTakesNoNewDescriptor) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer wants descriptors of its own";
  StubWorker stub;
  absl::Status status;
  {
    const NoDescriptors none;
    status = stub.worker->wait_until([] { return false; }, std::chrono::milliseconds(5));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

TEST(Sleep, EndsWithTheProgressThread) {
  StubWorker stub;
  for (int i = 0; i < 200; ++i) {
    const int before = stub.armed;
    ProgressThread thread(*stub.worker, {.spin = Time::zero()});
    until([&] { return stub.armed != before; }, [&] { stub.worker->progress(); });
  }
}

// The order that once left the bell readable for ever: the worker's round falls between the two
// steps of a wake-up. Such a worker never slept again.
// Promise(sleep): An idle worker sleeps | a bell is noted only after it was rung, so it is always
//   silenced
TEST(Sleep, IsSoundAfterARoundInTheMiddleOfAWakeUp) {
  StubWorker stub;
  Worker& worker = *stub.worker;
  until([&] { return !worker.progress() && worker.arm(); });
  bool hit = false;
  before_write = [&] {
    hit = true;
    worker.progress();
  };
  ASSERT_TRUE(worker.notify_detached(stub.peer, "news").ok());
  ASSERT_TRUE(hit);
  for (int i = 0; i < 3; ++i) {
    until([&] { return !worker.progress() && worker.arm(); });
  }
  EXPECT_FALSE(readable(worker.wait_fd())) << "it will be awake for ever";
}

}  // namespace
}  // namespace baton
