// Seeded fault schedules between two processes: connections are shut down under their owners,
// either process sleeps, is stopped, is killed, or leaves; transfers are cancelled and run out of
// time, and a target reuses its memory as soon as it has been told that it may. Nothing is lost,
// repeated, late or hung. What the kernel does with the processes is its own, so that a seed says
// what was tried, not what came of it.
//
// tests/seeds.h says which ones run.
#include <iostream>

#include "tests/hostile/real_check.h"
#include "tests/sanitized.h"
#include "tests/test.h"

namespace baton {
namespace {

using std::chrono::microseconds;

class TwoProcesses : public RealRun {
 public:
  using RealRun::RealRun;

 private:
  bool disturb() override {
    const size_t kill_at = pick(6) == 0 ? pick(300) : SIZE_MAX;
    size_t round = 0;
    return until([&] {
      const size_t side = pick(2);
      if (round++ == kill_at) {
        lose(side);
      } else if (pick(100) == 0 && dead_ == 2) {
        kill(pids_[side], SIGSTOP);
        std::this_thread::sleep_for(microseconds(pick(20'000)));
        kill(pids_[side], SIGCONT);
      }
      return over(0) && over(1);
    });
  }
  void pause() override { std::this_thread::sleep_for(microseconds(100)); }
};

class RealFaults : public testing::TestWithParam<std::string> {};

// Promise(lost): Between real processes that are killed, stopped and cut off over shm, tcp and
//   ucx, each transfer ends once and nothing lands late | a rail's number is unique across both
//   processes
TEST_P(RealFaults, EveryTransferEndsExactlyOnce) {
  if (!usable_in_a_fork(GetParam())) GTEST_SKIP() << GetParam() << " cannot be used here";
  const Seeds seeds(kSanitized ? 5 : 100);
  RealSeen seen;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    TwoProcesses(GetParam(), seed).run(seen);
    if (HasFailure()) return;
  }
  if (seeds.one) return;
  std::cout << seen.done << " done, " << seen.cuts << " connections cut, " << seen.resumed
            << " peers called again, " << seen.killed << " processes killed\n";
  // How many is a matter of time: on a busy machine more are late, or cancelled, or cut once only.
  EXPECT_GT(seen.done, 0u);
  EXPECT_GT(seen.cuts, 0u);
}

INSTANTIATE_TEST_SUITE_P(Providers, RealFaults, testing::Values("shm", "tcp", "ucx"),
                         [](const auto& each) { return each.param; });

}  // namespace
}  // namespace baton
