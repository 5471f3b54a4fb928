// What the library is to the process that it is in: signals, descriptors, threads, output; and to
// another user's process.
#include <baton/baton.h>
#include <sys/time.h>

#include <clocale>

#include "tests/capi/side.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::capi_tests {
namespace {

std::set<std::string> entries(const char* folder) {
  std::set<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    out.insert(entry.path().filename().string());
  }
  return out;
}
size_t count(const char* folder) { return entries(folder).size(); }

TEST(Process, IsAsItWasBefore) {
  struct sigaction before[NSIG] = {}, after = {};
  for (int i = 1; i < NSIG; ++i) sigaction(i, nullptr, &before[i]);
  sigset_t mask_before, mask_after;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask_before);
  const mode_t umask_before = umask(022);
  umask(umask_before);
  const std::string locale = setlocale(LC_ALL, nullptr);
  char folder[4096] = "";
  ASSERT_NE(getcwd(folder, sizeof folder), nullptr);
  // What is written to the standard output goes here meanwhile.
  const int output = memfd_create("output", MFD_CLOEXEC), kept = dup(1);
  fflush(stdout);
  dup2(output, 1);
  const bool worked = two_agents_work();
  Side quiet("quiet");
  EXPECT_EQ(baton_agent_add_remote(quiet.agent, "junk", 4, nullptr, &quiet.error),
            BATON_ERR_MISMATCH);
  fflush(stdout);
  const off_t written = lseek(output, 0, SEEK_END);
  dup2(kept, 1);
  close(kept);
  close(output);
  EXPECT_TRUE(worked);
  EXPECT_EQ(written, 0);
  for (int i = 1; i < NSIG; ++i) {
    if (i == SIGSEGV || i == SIGBUS || sigaction(i, nullptr, &after) != 0) continue;
    EXPECT_EQ(after.sa_handler, before[i].sa_handler) << i;
  }
  pthread_sigmask(SIG_SETMASK, nullptr, &mask_after);
  for (int i = 1; i < NSIG; ++i) {
    EXPECT_EQ(sigismember(&mask_after, i), sigismember(&mask_before, i)) << i;
  }
  EXPECT_EQ(umask(umask_before), umask_before);
  EXPECT_EQ(setlocale(LC_ALL, nullptr), locale);
  char now[4096] = "";
  EXPECT_STREQ(getcwd(now, sizeof now), folder);
}

// Threads that agents and connectors are made with take none of the program's signals.
TEST(Process, SignalsComeToItsOwnThreads) {
  const std::set<std::string> before = entries("/proc/self/task");
  const Side one("one");
  ASSERT_TRUE(one.good());
  baton_kv_connector* const connector = open_connector("connector");
  int made = 0;
  for (const std::string& task : entries("/proc/self/task")) {
    if (before.contains(task)) continue;
    std::ifstream status("/proc/self/task/" + task + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigBlk:", 0) != 0) continue;
      const uint64_t blocked = std::stoull(line.substr(8), nullptr, 16);
      for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGALRM, SIGCHLD, SIGRTMIN + 3}) {
        EXPECT_NE(blocked >> (signal - 1) & 1, 0U) << "signal " << signal << " in thread " << task;
      }
      ++made;
    }
  }
  EXPECT_GE(made, 2);
  baton_kv_connector_destroy(connector);
}

TEST(Process, WhatItExecutesInheritsNothing) {
  const auto open_ones = [] {
    std::set<int> out;
    for (int fd = 3; fd < 4096; ++fd) {
      if (fcntl(fd, F_GETFD) >= 0) out.insert(fd);
    }
    return out;
  };
  const std::set<int> before = open_ones();
  Side a("a"), b("b", "tcp"), c("c", "tcp");
  ASSERT_TRUE(a.good() && b.good() && c.good());
  ASSERT_TRUE(b.meet(c.metadata()));
  const auto there = reinterpret_cast<uint64_t>(c.memory());
  EXPECT_EQ(baton_transfer_run(b.agent, b.make(BATON_WRITE, "c", there), kLong, &b.error), BATON_OK)
      << b.error.text;
  baton_kv_connector* const connector = open_connector("connector");
  for (const int fd : open_ones()) {
    if (before.contains(fd)) continue;
    char path[64], what[256] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    [[maybe_unused]] const ssize_t got = readlink(path, what, sizeof what - 1);
    EXPECT_NE(fcntl(fd, F_GETFD) & FD_CLOEXEC, 0) << fd << " is " << what;
  }
  baton_kv_connector_destroy(connector);
}

TEST(Process, WhatIsDestroyedIsGone) {
  const auto round = [] {
    EXPECT_TRUE(two_agents_work());
    baton_kv_connector* const connector = open_connector("connector");
    baton_kv_connector_destroy(connector);
  };
  for (int i = 0; i < 3; ++i) round();
  const size_t descriptors = count("/proc/self/fd"), threads = count("/proc/self/task");
  for (int i = 0; i < 30; ++i) round();
  EXPECT_EQ(count("/proc/self/fd"), descriptors);
  // A thread that was joined is listed for a moment longer.
  until([&] { return count("/proc/self/task") <= threads; });
  // Names of other programs come meanwhile, but not in each round.
  until([&] {
    const std::set<std::string> before = entries("/dev/shm");
    round();
    const std::set<std::string> after = entries("/dev/shm");
    return std::includes(before.begin(), before.end(), after.begin(), after.end());
  });
}

// A signal handler that interrupts every system call changes nothing.
TEST(Process, SignalsInterruptNoCall) {
  static std::atomic<int> rung{0};
  struct sigaction action = {}, old = {};
  action.sa_handler = [](int) { ++rung; };  // without SA_RESTART
  sigaction(SIGALRM, &action, &old);
  const itimerval often{{0, 300}, {0, 300}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(two_agents_work());
  {
    Side a("a"), b("b");
    EXPECT_TRUE(a.meet(b.metadata()));
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    EXPECT_EQ(baton_wait_message(b.agent, 50'000'000, nullptr, nullptr, &b.error),
              BATON_ERR_TIMEOUT);
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(50));
    EXPECT_EQ(baton_notify(a.agent, "b", "x", 1, &a.error), BATON_OK);
    EXPECT_EQ(baton_wait_message(b.agent, kLong, nullptr, nullptr, &b.error), BATON_OK);
    baton_kv_connector* const connector = open_connector("connector");
    // It has just begun, so something may happen; but not a hundred times.
    int32_t result = BATON_OK;
    for (int i = 0; i < 100 && result == BATON_OK; ++i) {
      const auto began = Clock::now();
      result = baton_kv_connector_wait(connector, 50'000'000, nullptr);
      EXPECT_TRUE(result == BATON_OK || Clock::now() - began >= std::chrono::milliseconds(50));
    }
    EXPECT_EQ(result, BATON_ERR_TIMEOUT);
    baton_kv_connector_destroy(connector);
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &old, nullptr);
  EXPECT_GT(rung, 10);
}

// Who has the same key, and is somebody else on this machine.
TEST(Process, AnotherUserIsAPeer) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be somebody else";
  const TemporaryFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  const std::string mine = folder.path("mine"), theirs = folder.path("theirs");
  for (const std::string& path : {mine, theirs}) {
    const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    ASSERT_EQ(write(fd, "a key of two users", 18), 18);
    close(fd);
  }
  constexpr uid_t kNobody = 65534;
  ASSERT_EQ(chown(theirs.c_str(), kNobody, kNobody), 0);
  Child child([&](int in, int out) {
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) return 1;
    Side side("peer", "", theirs.c_str());
    if (!side.good()) return 2;
    memset(side.memory(), 'p', kBytes);
    const auto at = reinterpret_cast<uint64_t>(side.memory());
    say(out, side.metadata());
    say(out, std::string(reinterpret_cast<const char*>(&at), sizeof at));
    wait_for_end(in);
    return side.memory()[0] == 'h' ? 0 : 3;
  });
  Side here("here", "", mine.c_str());
  ASSERT_TRUE(here.good()) << here.error.text;
  ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
  const uint64_t there = number(child.hear());
  EXPECT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_READ, "peer", there), kLong, &here.error),
      BATON_OK)
      << here.error.text;
  EXPECT_EQ(here.memory()[kBytes - 1], 'p');
  memset(here.memory(), 'h', kBytes);
  EXPECT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_WRITE, "peer", there), kLong, &here.error),
      BATON_OK)
      << here.error.text;
  child.let_end();
  EXPECT_EQ(child.ends(), 0);
}

}  // namespace
}  // namespace baton::capi_tests
