// Calls that poll move the bytes themselves: help() waits for nobody, a ProgressThread stands back
// meanwhile, and drives again when the help ends.
#include <climits>

#include "tests/manual_clock.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/transport/stub_provider.h"
#include "tests/until.h"
#include "transport/progress_thread.h"

namespace baton {
namespace {

const Time kHelpComesWithin = until_gives_up();
const ProgressThread::Options kAwake{.spin = std::chrono::hours(1000)};

// Counts the looks of all threads but the test's.
class CountingClock final : public Clock {
 public:
  Time now() const override {
    if (std::this_thread::get_id() != test_) ++looks_of_others;
    return time_.now();
  }
  void advance(Time by) { time_.advance(by); }
  mutable std::atomic<int> looks_of_others{0};

 private:
  ManualClock time_;
  const std::thread::id test_ = std::this_thread::get_id();
};

// Counts the rounds of each side, and can be slow.
class CountingProvider : public StubProvider {
 public:
  using StubProvider::StubProvider;
  bool progress(EventSink&) override {
    ++(std::this_thread::get_id() == test_ ? rounds_of_test : rounds_of_others);
    inside = true;
    if (CountingClock* moved = clock; moved != nullptr) {
      moved->advance(std::chrono::milliseconds(1));
    }
    while (slow.load()) std::this_thread::yield();
    if (pause.load() != Time::zero()) std::this_thread::sleep_for(pause.load());
    inside = false;
    return something.load() && rounds_of_others < most_rounds;
  }
  std::atomic<int> rounds_of_test{0}, rounds_of_others{0};
  std::atomic<bool> inside{false}, slow{false}, something{false};
  std::atomic<CountingClock*> clock{nullptr};  // rounds take a millisecond of it
  std::atomic<Time> pause{Time::zero()};       // and so long
  std::atomic<int> most_rounds{INT_MAX};       // something happens in

 private:
  const std::thread::id test_ = std::this_thread::get_id();
};

class Help : public testing::Test {
 protected:
  // As whoever polls: again, before the clock has moved.
  void help_often() {
    for (int helped = provider_->rounds_of_test; provider_->rounds_of_test < helped + 2;) {
      worker_->help();
    }
  }
  // The thread's rounds while this one does nothing, until it has looked often enough whether it
  // may have one: in a round it looks a few times. One that waits for the lock does not look.
  int rounds_meanwhile() {
    const int before = provider_->rounds_of_others;
    const int looks = clock_.looks_of_others;
    const Time end = Clock::steady().now() + patient(std::chrono::seconds(1));
    until([&] { return clock_.looks_of_others >= looks + 50 || Clock::steady().now() > end; });
    return provider_->rounds_of_others - before;
  }
  void until_the_thread_drives(CallSite from = CallSite::here()) {
    const int before = provider_->rounds_of_others;
    until([&] { return provider_->rounds_of_others != before; }, LetOthersRun(), NoState(), from);
  }

  CountingClock clock_;
  std::atomic<int> armed_{0};
  CountingProvider* provider_ = nullptr;
  const std::unique_ptr<Worker> worker_ =
      *worker_over(provider_, armed_, {.name = "helped", .clock = &clock_});
};

// Who waits for the lock has it after a round or two of a thread that always has something to do.
TEST_F(Help, AThreadThatIsBusyGivesWay) {
  constexpr int kTimes = 20, kMostRounds = 20 * kTimes;
  provider_->something = true;
  provider_->clock = &clock_;
  provider_->pause = std::chrono::milliseconds(2);
  provider_->most_rounds = kMostRounds;  // the thread sleeps then, and whoever waits has the lock
  ProgressThread thread(*worker_);
  for (int i = 0; i < kTimes; ++i) EXPECT_EQ(worker_->stats().peers_up, 0u);
  EXPECT_LT(provider_->rounds_of_others, kMostRounds);
}

TEST_F(Help, IsARound) {
  EXPECT_FALSE(worker_->help());
  provider_->something = true;
  EXPECT_TRUE(worker_->help());
  EXPECT_EQ(provider_->rounds_of_test, 2);
}

TEST_F(Help, NeverBlocks) {
  provider_->slow = true;
  std::thread other([&] { worker_->progress(); });
  until([&] { return provider_->inside.load(); });
  EXPECT_FALSE(worker_->help());
  EXPECT_EQ(provider_->rounds_of_test, 0);
  provider_->slow = false;
  other.join();
}

TEST_F(Help, LetsTheThreadStandBackAsLongAsItComesOften) {
  ProgressThread thread(*worker_, kAwake);
  until_the_thread_drives();
  help_often();
  // One that it was about to begin when the help came.
  EXPECT_LE(rounds_meanwhile(), 1);
  clock_.advance(std::chrono::milliseconds(1));
  until_the_thread_drives();
}

// A round that copies for long is no pause of the one who polls.
TEST_F(Help, MayTakeLong) {
  ProgressThread thread(*worker_, kAwake);
  until_the_thread_drives();
  help_often();
  rounds_meanwhile();
  provider_->clock = &clock_;
  help_often();
  EXPECT_EQ(rounds_meanwhile(), 0);
  provider_->slow = true;
  std::thread other([&] {
    until([&] { return provider_->inside.load(); });
    EXPECT_EQ(rounds_meanwhile(), 0);
    provider_->slow = false;
  });
  worker_->help();
  other.join();
  EXPECT_EQ(rounds_meanwhile(), 0) << "it waited for the lock meanwhile";
}

// Else the two take turns at every piece of a transfer.
TEST_F(Help, TakesOverFromAThreadThatIsAtIt) {
  provider_->something = true;
  provider_->slow = true;
  ProgressThread thread(*worker_, kAwake);
  until([&] { return provider_->inside.load(); });
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(worker_->help());
  const int before = provider_->rounds_of_others;
  provider_->slow = false;
  help_often();
  EXPECT_EQ(provider_->rounds_of_others, before) << "it goes on";
  clock_.advance(std::chrono::milliseconds(1));
  until_the_thread_drives();
}

// Who waits has nothing else to do, so he waits for the thread's round, and does the next ones.
TEST_F(Help, AWaitingHelperTakesOverFromASlowThread) {
  provider_->something = true;
  provider_->clock = &clock_;
  provider_->pause = std::chrono::milliseconds(2);
  ProgressThread thread(*worker_, kAwake);
  until_the_thread_drives();
  EXPECT_TRUE(
      worker_->wait_until([&] { return provider_->rounds_of_test >= 3; }, std::chrono::seconds(10))
          .ok());
}

// Who looks once in a while leaves the bytes to the thread.
TEST_F(Help, OnceInAWhileIsNotOften) {
  ProgressThread thread(*worker_, kAwake);
  until_the_thread_drives();
  for (int i = 0; i < 10; ++i) {
    for (int helped = provider_->rounds_of_test; provider_->rounds_of_test == helped;) {
      clock_.advance(std::chrono::milliseconds(1));
      worker_->help();
    }
    until_the_thread_drives();
  }
}

// It is not made ready to sleep again in each round.
TEST_F(Help, APollingHelperDoesNotRearmTheThread) {
  ProgressThread thread(*worker_, {.spin = Time::zero()});
  until([&] { return armed_ != 0; });
  const int before = armed_;
  for (int i = 0; i < 100; ++i) help_often();
  EXPECT_LE(armed_, before + 1) << "it may have been about to sleep";
}

// Somebody waits, and makes a few rounds himself; then the thread must not stand back any longer.
TEST_F(Help, EndsWhenAWaitGoesToSleep) {
  ProgressThread thread(*worker_, kAwake);
  until_the_thread_drives();
  int looks = 0;
  int thread_was_at = -1;
  const Time end = Clock::steady().now() + kHelpComesWithin;
  const absl::Status waited = worker_->wait_until(
      [&] {
        if (provider_->rounds_of_test < 2) return false;
        if (++looks < 50) {
          clock_.advance(std::chrono::nanoseconds(500));  // asleep after 20 us of them
          return false;
        }
        if (Clock::steady().now() > end) return true;
        // From here on the clock stands: only a call brings the thread back.
        if (thread_was_at < 0) thread_was_at = provider_->rounds_of_others;
        return provider_->rounds_of_others > thread_was_at + 1;
      },
      std::chrono::seconds(1));
  EXPECT_TRUE(waited.ok()) << waited;
  EXPECT_LE(Clock::steady().now(), end) << "nobody drives the worker";
}

}  // namespace
}  // namespace baton
