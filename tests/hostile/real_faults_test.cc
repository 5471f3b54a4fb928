// Seeded fault schedules between two processes: connections are shut down under their owners,
// either process sleeps, is stopped, is killed, or leaves; transfers are cancelled and run out of
// time, and a target reuses its memory as soon as it has been told that it may. Nothing is lost,
// repeated, late or hung. What the kernel does with the processes is its own, so that a seed says
// what was tried, not what came of it.
//
// tests/seeds.h says which ones run.
#include "tests/hostile/real_check.h"
#include "tests/hostile/real_schedule.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/until.h"
#include "tests/usable_provider.h"
#include "transport/base/child.h"

namespace baton {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Asked in a process of its own: libraries that have begun do not survive a fork.
bool usable(const std::string& provider) {
  const pid_t child = base::fork_child();
  if (child == 0) _exit(why_unusable(provider).empty() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

class TwoProcesses {
 public:
  TwoProcesses(const std::string& provider, uint64_t seed)
      : schedule_(provider, seed), shared_(*schedule_.shared), random_(~seed) {}
  ~TwoProcesses() {
    for (size_t side = 0; side < 2; ++side) reap(side, SIGKILL);
  }

  void run() {
    for (size_t side = 0; side < 2; ++side) {
      pids_[side] = base::fork_child();
      if (pids_[side] != 0) continue;
      run_real_side(schedule_, side);
      _exit(0);
    }
    if (!until([&] { return began(0) && began(1); })) return report("they did not meet");
    if (pick(6) == 0) kill_at_ = pick(300);
    const bool over = until([&] {
      disturb();
      return over_or_dead(0) && over_or_dead(1);
    });
    if (!over) return report("hung");
    shared_.finish = 1;
    for (size_t side = 0; side < 2; ++side) reap(side, 0);
    for (size_t side = 0; side < 2; ++side) {
      EXPECT_STREQ(shared_.sides[side].failure, "") << "side " << side;
    }
    for (size_t i = 0; i < kRealTransfers; ++i) done_ += check_real_item(schedule_, i, dead_);
  }

  size_t done() const { return done_; }
  size_t cuts() const { return static_cast<size_t>(shared_.sides[0].cuts + shared_.sides[1].cuts); }
  uint64_t resumed() const { return shared_.sides[0].resumed + shared_.sides[1].resumed; }
  bool killed() const { return dead_ < 2; }

 private:
  size_t pick(size_t limit) { return static_cast<size_t>(random_() % limit); }
  bool began(size_t side) const { return shared_.sides[side].began != 0; }
  bool over_or_dead(size_t side) const { return shared_.sides[side].done != 0 || dead_ == side; }

  bool until(const std::function<bool()>& ready) {
    const Time end = Clock::steady().now() + until_gives_up();
    while (!ready()) {
      if (Clock::steady().now() > end) return false;
      if (shared_.sides[0].failure[0] != 0 || shared_.sides[1].failure[0] != 0) return false;
      std::this_thread::sleep_for(microseconds(100));
    }
    return true;
  }

  void disturb() {
    const size_t side = pick(2);
    if (round_ == kill_at_) {
      reap(side, SIGKILL);
      dead_ = side;
    } else if (pick(100) == 0 && dead_ == 2) {
      kill(pids_[side], SIGSTOP);
      std::this_thread::sleep_for(microseconds(pick(20'000)));
      kill(pids_[side], SIGCONT);
    }
    ++round_;
  }

  void reap(size_t side, int signal) {
    if (pids_[side] <= 0) return;
    if (signal != 0) kill(pids_[side], signal);
    int status = 0;
    waitpid(std::exchange(pids_[side], -1), &status, 0);
    if (signal != 0) return;
    EXPECT_EQ(status, 0) << "side " << side << " died";
  }

  void report(const char* what) {
    ADD_FAILURE() << what << ": side 0: \"" << shared_.sides[0].failure << "\", done "
                  << shared_.sides[0].done << "; side 1: \"" << shared_.sides[1].failure
                  << "\", done " << shared_.sides[1].done << "; killed " << dead_;
  }

  RealSchedule schedule_;
  RealShared& shared_;
  std::mt19937_64 random_;
  std::array<pid_t, 2> pids_{-1, -1};
  size_t dead_ = 2;  // which side was killed
  size_t kill_at_ = SIZE_MAX;
  size_t round_ = 0;
  size_t done_ = 0;
};

class RealFaults : public testing::TestWithParam<std::string> {};

TEST_P(RealFaults, EveryTransferEndsExactlyOnce) {
  if (!usable(GetParam())) GTEST_SKIP() << GetParam() << " cannot be used here";
  const Seeds seeds(kSanitized ? 5 : 100);
  size_t done = 0, cuts = 0, killed = 0;
  uint64_t resumed = 0;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    TwoProcesses run(GetParam(), seed);
    run.run();
    if (HasFailure()) return;
    done += run.done();
    cuts += run.cuts();
    resumed += run.resumed();
    killed += run.killed() ? 1 : 0;
  }
  if (seeds.one) return;
  std::cout << done << " done, " << cuts << " connections cut, " << resumed
            << " peers called again, " << killed << " processes killed\n";
  // How many is a matter of time: on a busy machine more are late, or cancelled, or cut once only.
  EXPECT_GT(done, 0u);
  EXPECT_GT(cuts, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, RealFaults, testing::Values("shm", "tcp", "ucx"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton
