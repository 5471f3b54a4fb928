// Forked ranks: how they end, what the launcher makes of it, and that nobody is left behind.
#include <sched.h>

#include "collectives/launch.h"
#include "collectives/rendezvous.h"
#include "tests/test.h"
#include "tests/used.h"
#include "transport/base/child.h"

namespace baton::launch {
namespace {

using collectives::RankInfo;
using testing::HasSubstr;
using testing::Not;

const ClusterKey& key() {
  static const ClusterKey kKey = *ClusterKey::from_bytes("the key of the launcher's tests");
  return kKey;
}

ForkOptions options(int ranks) {
  ForkOptions options;
  options.ranks = ranks;
  options.key = key();
  options.grace = std::chrono::milliseconds(50);
  return options;
}

ForkOptions restarting(int ranks) {
  ForkOptions restarting = options(ranks);
  restarting.restart = true;
  return restarting;
}

absl::StatusOr<std::vector<RankInfo>> meet_others_and_keep(const Place& place,
                                                           uint64_t generation) {
  RankInfo info{.rank = static_cast<uint32_t>(place.rank),
                .ranks = static_cast<uint32_t>(place.ranks),
                .generation = generation,
                .version = collectives::kCollectivesVersion,
                .pid = static_cast<uint32_t>(getpid())};
  info.host = "here";
  return collectives::meet(place.rendezvous, key(), info, std::chrono::minutes(1));
}

// Meets the others; 0 if all are there.
int meet_others(const Place& place, uint64_t generation) {
  const auto rank_infos = meet_others_and_keep(place, generation);
  if (rank_infos.ok()) return static_cast<int>(rank_infos->size()) - place.ranks;
  std::fprintf(stderr, "%s\n", std::string(rank_infos.status().message()).c_str());
  return 99;
}

[[noreturn]] void wait_for_ever() {
  while (true) pause();
}

// A pipe that is inherited: it ends when the last process that has it is gone.
class Lifeline {
 public:
  Lifeline() { EXPECT_EQ(0, pipe2(ends_, O_CLOEXEC)); }
  ~Lifeline() {
    close(ends_[0]);
    if (ends_[1] >= 0) close(ends_[1]);
  }
  int write_end() const { return ends_[1]; }
  void until_written(size_t bytes) {
    char byte;
    for (; bytes > 0; --bytes) ASSERT_EQ(1, read(ends_[0], &byte, 1));
  }
  void until_all_are_gone() {
    close(ends_[1]);
    ends_[1] = -1;
    char byte;
    while (read(ends_[0], &byte, 1) > 0) {
    }
  }

 private:
  int ends_[2] = {-1, -1};
};

// What fork_ranks() prints to the standard streams, children included.
struct Captured {
  int status = -1;
  std::string out;
  std::string err;
};
Captured captured(const ForkOptions& options, const std::function<int(const Place&, int)>& main) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const auto status = fork_ranks(options, main);
  Captured result{.out = testing::internal::GetCapturedStdout(),
                  .err = testing::internal::GetCapturedStderr()};
  EXPECT_TRUE(status.ok()) << status.status();
  result.status = status.value_or(-1);
  return result;
}

class ForkRanks : public testing::Test {
 protected:
  const Used before_;

  void TearDown() override {
    EXPECT_EQ(-1, waitpid(-1, nullptr, WNOHANG));  // no child, not even a dead one
    EXPECT_EQ(Used().descriptors, before_.descriptors);
  }
};

TEST_F(ForkRanks, AllMeetAndReturnZero) {
  const Captured run = captured(options(8), [](const Place& place, int restarts) {
    if (place.ranks != 8 || place.local_rank != place.rank || place.local_ranks != 8) return 1;
    if (place.serves || place.launcher != "baton" || restarts != 0) return 2;
    return meet_others(place, place.generation);
  });
  EXPECT_EQ(0, run.status) << run.err;
}

TEST_F(ForkRanks, TheFirstFailureIsTheResultAndTheOthersAreKilled) {
  const Captured run = captured(options(4), [](const Place& place, int) {
    if (meet_others(place, 0) != 0) return 1;
    if (place.rank == 2) return 42;
    wait_for_ever();
  });
  EXPECT_EQ(42, run.status);
  EXPECT_THAT(run.err, HasSubstr("rank 2 failed with exit status 42"));
  EXPECT_THAT(run.err, HasSubstr("rank(s) 0-1, 3 did not end"));
}

TEST_F(ForkRanks, AKilledRankIsNamedWithItsSignal) {
  const Captured run = captured(options(3), [](const Place& place, int) {
    if (meet_others(place, 0) != 0) return 1;
    if (place.rank == 2) kill(getpid(), SIGKILL);
    wait_for_ever();
  });
  EXPECT_EQ(128 + SIGKILL, run.status);
  EXPECT_THAT(run.err, HasSubstr("rank 2 was killed by signal 9 (Killed)"));
}

TEST_F(ForkRanks, OthersThatFailByThemselvesAreNotReported) {
  ForkOptions patient = options(3);
  patient.grace = std::chrono::minutes(2);
  const Captured run = captured(patient, [](const Place& place, int) {
    const auto rank_infos = meet_others_and_keep(place, 0);
    if (!rank_infos.ok()) return 99;
    if (place.rank == 0) return 7;
    // As ranks do that see another one die: end by themselves, when the launcher has seen it.
    while (kill(static_cast<pid_t>(rank_infos->at(0).pid), 0) == 0) sched_yield();
    return 8;
  });
  EXPECT_EQ(7, run.status);
  EXPECT_THAT(run.err, HasSubstr("rank 0 failed with exit status 7"));
  EXPECT_THAT(run.err, Not(HasSubstr("rank 1 ")));
  EXPECT_THAT(run.err, Not(HasSubstr("killed")));
}

TEST_F(ForkRanks, AnExitStatusThatDoesNotFitIsStillAFailure) {
  EXPECT_EQ(1, captured(options(1), [](const Place&, int) { return 256; }).status);
}

TEST_F(ForkRanks, ADeadRankIsStartedAnewAndMeetsTheOthersAgain) {
  const Captured run = captured(restarting(4), [](const Place& place, int restarts) {
    if (place.generation != static_cast<uint64_t>(restarts)) return 3;
    for (uint64_t generation = place.generation; generation <= 2; ++generation) {
      if (meet_others(place, generation) != 0) return 4;
      if (generation < 2 && place.rank == 1) kill(getpid(), SIGKILL);
    }
    return 0;
  });
  EXPECT_EQ(0, run.status) << run.err;
  EXPECT_THAT(
      run.err,
      HasSubstr("rank 1 was killed by signal 9 (Killed); restarting it (1 of 3 within 1h)"));
  EXPECT_THAT(run.err, HasSubstr("(2 of 3 within 1h)"));
}

TEST_F(ForkRanks, RanksThatDieTogetherComeBackIntoOneGeneration) {
  const Captured run = captured(restarting(4), [](const Place& place, int restarts) {
    if (restarts == 0) {
      if (meet_others(place, place.generation) != 0) return 4;
      if (place.rank == 1 || place.rank == 2) return 5;
      return meet_others(place, place.generation + 1);
    }
    return place.generation == 1 ? meet_others(place, place.generation) : 6;
  });
  EXPECT_EQ(0, run.status) << run.err;
}

TEST_F(ForkRanks, ARankThatDiesBeforeItMeetsComesBackIntoTheSameGeneration) {
  const Captured run = captured(restarting(3), [](const Place& place, int restarts) {
    if (place.rank == 0 && restarts == 0) return 5;
    return place.generation == 0 ? meet_others(place, 0) : 6;
  });
  EXPECT_EQ(0, run.status) << run.err;
}

TEST_F(ForkRanks, RestartsEnd) {
  ForkOptions twice = restarting(2);
  twice.max_restarts = 2;
  const Captured run = captured(twice, [](const Place& place, int restarts) {
    if (place.rank == 1) return 10 + restarts;
    wait_for_ever();
  });
  EXPECT_EQ(12, run.status);
  EXPECT_THAT(run.err, HasSubstr("(2 of 2 within 1h)"));
  EXPECT_THAT(run.err, Not(HasSubstr("(3 of")));
}

// A run of months may lose more ranks than a bad hour may.
TEST_F(ForkRanks, RestartsOfLongAgoDoNotCount) {
  ForkOptions often = restarting(2);
  often.max_restarts = 1;
  often.restart_period = std::chrono::nanoseconds(1);
  const Captured run = captured(often, [](const Place& place, int restarts) {
    if (meet_others(place, place.generation) != 0) return 1;
    for (uint64_t generation = place.generation; generation < 3; ++generation) {
      if (place.rank == 1) return 10 + restarts;
      if (meet_others(place, generation + 1) != 0) return 2;
    }
    return 0;
  });
  EXPECT_EQ(0, run.status) << run.err;
  for (const char* status : {"status 10;", "status 11;", "status 12;"}) {
    EXPECT_THAT(run.err, HasSubstr(absl::StrCat("rank 1 failed with exit ", status)));
  }
}

// A rank returns 0 when the work of all is done: nobody is there any more whom another could meet.
TEST_F(ForkRanks, NoRankRestartsAfterTheWorkIsDone) {
  const Captured run = captured(restarting(3), [](const Place& place, int restarts) {
    const auto all = meet_others_and_keep(place, place.generation);
    if (!all.ok() || restarts > 0) return 3;
    if (place.rank == 0) return 0;
    if (place.rank == 1) {
      // Thinks that the others go on without it, and would wait for them for a minute.
      const auto again = meet_others_and_keep(place, 1);
      return absl::IsCancelled(again.status()) ? 4 : 5;
    }
    while (kill(static_cast<pid_t>(all->at(0).pid), 0) == 0) sched_yield();
    kill(getpid(), SIGKILL);
    return 6;
  });
  EXPECT_EQ(0, run.status) << run.err;
  EXPECT_THAT(
      run.err,
      HasSubstr("rank 1 failed with exit status 4, after all ranks had finished their work"));
  EXPECT_THAT(run.err, HasSubstr("rank 2 was killed by signal 9 (Killed), after all ranks"));
  EXPECT_THAT(run.err, Not(HasSubstr("restarting it")));
}

TEST_F(ForkRanks, WhatARankCannotPrintIsAFailure) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (full < 0) GTEST_SKIP() << "there is no /dev/full here";
  const Captured run = captured(options(2), [&](const Place& place, int) {
    if (place.rank == 1) dup2(full, STDOUT_FILENO);
    std::printf("of rank %d\n", place.rank);
    return 0;
  });
  close(full);
  EXPECT_THAT(run.err, HasSubstr("rank 1: standard output could not be written"));
  EXPECT_EQ(run.status, 1);
}

TEST_F(ForkRanks, OutputThatWasNotFlushedAppearsOnce) {
  testing::internal::CaptureStdout();
  std::printf("of the launcher, ");
  const auto status = fork_ranks(options(2), [](const Place& place, int) {
    std::printf("of rank %d, ", place.rank);
    return 0;
  });
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(status.ok() && *status == 0);
  EXPECT_EQ(out.find("launcher"), out.rfind("launcher"));
  EXPECT_THAT(out, HasSubstr("of rank 1, "));
}

TEST_F(ForkRanks, NoRanksIsAnError) {
  EXPECT_TRUE(absl::IsInvalidArgument(
      fork_ranks(options(0), [](const Place&, int) { return 0; }).status()));
}

// A launcher in a process of its own, whose ranks hold `lifeline` and write a byte when they run.
pid_t launcher_of(int ranks, Lifeline& lifeline, int (*after_that)()) {
  const pid_t pid = base::fork_child();
  if (pid != 0) return pid;
  const auto status = fork_ranks(options(ranks), [&](const Place& place, int) {
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    if (after_that != nullptr) sigprocmask(SIG_BLOCK, &term, nullptr);
    if (meet_others(place, 0) != 0 || write(lifeline.write_end(), "r", 1) != 1) return 1;
    if (after_that == nullptr) wait_for_ever();
    int number = 0;
    sigwait(&term, &number);
    return after_that();
  });
  _exit(status.value_or(200));
}

int exit_status_of(pid_t launcher) {
  int status = 0;
  EXPECT_EQ(launcher, waitpid(launcher, &status, 0));
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(ForkRanks, SignalsToTheLauncherReachItsRanks) {
  const struct {
    int signal;
    int (*after_that)();
    int status;
  } cases[] = {{SIGKILL, nullptr, 128 + SIGKILL},
               {SIGTERM, nullptr, 128 + SIGTERM},
               {SIGTERM, [] { return 0; }, 0}};
  for (const auto& [signal, after_that, status] : cases) {
    Lifeline lifeline;
    const pid_t launcher = launcher_of(3, lifeline, after_that);
    lifeline.until_written(3);
    kill(launcher, signal);
    EXPECT_EQ(exit_status_of(launcher), status);
    lifeline.until_all_are_gone();  // or this never returns
  }
}

}  // namespace
}  // namespace baton::launch
