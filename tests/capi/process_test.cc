// What the library is to the process that it is in, and to those beside it: signals, descriptors,
// threads, output, forks; peers that are killed or stopped. From the header alone.
#include <baton/baton.h>
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <clocale>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kLong = 60'000'000'000;
constexpr size_t kBytes = 1 << 20;

// An agent with memory. `provider`: "" for any.
class Side {
 public:
  explicit Side(const char* name, const char* provider = "", const char* key_file = nullptr) {
    baton_agent_options options;
    baton_agent_options_init(&options, sizeof options);
    options.name = name;
    options.require = provider;
    options.key_file = key_file;
    good_ = baton_agent_create(&options, &agent, &error) == BATON_OK &&
            baton_agent_register(agent, BATON_DRAM, &whole_, 1, &error) == BATON_OK;
  }
  ~Side() {
    baton_agent_destroy(agent);
    unmap();
  }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  bool good() const { return good_; }
  void unmap() {
    if (memory_ != nullptr) munmap(memory_, kBytes);
    memory_ = nullptr;
  }
  char* memory() { return memory_; }
  baton_descriptor part(size_t bytes) const { return {whole_.address, bytes, 0}; }
  std::string metadata() {
    baton_bytes bytes{};
    if (baton_agent_metadata(agent, &bytes, &error) != BATON_OK) return "";
    std::string out(bytes.data, bytes.size);
    baton_bytes_free(&bytes);
    return out;
  }
  bool meet(const std::string& metadata) {
    return baton_agent_add_remote(agent, metadata.data(), metadata.size(), nullptr, &error) ==
           BATON_OK;
  }
  baton_transfer make(int32_t op, const char* other, uint64_t there, size_t bytes = kBytes) {
    const baton_descriptor local = part(bytes), remote{there, bytes, 0};
    baton_transfer out = 0;
    baton_transfer_make_direct(agent, op, BATON_DRAM, &local, 1, &remote, 1, other, nullptr, 0,
                               &out, &error);
    return out;
  }
  baton_agent* agent = nullptr;
  baton_error error = BATON_ERROR_INIT;

 private:
  char* memory_ = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  bool good_ = false;
  const baton_descriptor whole_{reinterpret_cast<uint64_t>(memory_), kBytes, 0};
};

// Two agents of this process meet and move something. For children, which cannot fail a test.
bool two_agents_work(const char* key_file = nullptr) {
  Side a("a", "", key_file), b("b", "", key_file);
  if (!a.good() || !b.good() || !a.meet(b.metadata())) return false;
  a.memory()[7] = 'x';
  const baton_transfer write =
      a.make(BATON_WRITE, "b", reinterpret_cast<uint64_t>(b.memory()), 4096);
  if (baton_transfer_run(a.agent, write, kLong, &a.error) != BATON_OK) return false;
  return b.memory()[7] == 'x';
}

// A child that runs `body(in, out)` and ends with what it returns; SIGALRM ends one that hangs.
class Child {
 public:
  explicit Child(const std::function<int(int, int)>& body) {
    int up[2], down[2];
    EXPECT_EQ(pipe2(up, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(down, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      close(up[0]);
      close(down[1]);
      signal(SIGALRM, SIG_DFL);
      alarm(120);
      _exit(body(down[0], up[1]));
    }
    close(up[1]);
    close(down[0]);
    out_ = down[1];
    in_ = up[0];
  }
  ~Child() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(in_);
    close(out_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  int ends() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return status;
  }
  void stop() {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  void go_on() { kill(pid_, SIGCONT); }
  void kill_it() {
    kill(pid_, SIGKILL);
    ends();
  }
  // What it said with say(), in whole.
  std::string hear() {
    uint32_t size = 0;
    if (read(in_, &size, sizeof size) != sizeof size) return "";
    std::string text(size, 0);
    for (size_t at = 0; at < size;) {
      const ssize_t got = read(in_, text.data() + at, size - at);
      if (got <= 0) return "";
      at += static_cast<size_t>(got);
    }
    return text;
  }
  void let_end() { close(std::exchange(out_, -1)); }

 private:
  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
};
void say(int fd, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  if (write(fd, &size, sizeof size) < 0 || write(fd, text.data(), size) < 0) _exit(99);
}
void wait_for_end(int fd) {
  char byte = 0;
  while (read(fd, &byte, 1) > 0) {
  }
}
// A peer with an agent called "peer", which says its metadata and where its memory is.
int peer(const char* provider, int in, int out) {
  Side side("peer", provider);
  if (!side.good()) return 1;
  memset(side.memory(), 'p', kBytes);
  const auto at = reinterpret_cast<uint64_t>(side.memory());
  say(out, side.metadata());
  say(out, std::string(reinterpret_cast<const char*>(&at), sizeof at));
  wait_for_end(in);
  return 0;
}
uint64_t number(const std::string& text) {
  uint64_t out = 0;
  if (text.size() == sizeof out) memcpy(&out, text.data(), sizeof out);
  return out;
}

size_t entries(const char* folder) {
  size_t count = 0;
  DIR* dir = opendir(folder);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

struct Beside : ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Providers, Beside, ::testing::Values("shm", "tcp"),
                         [](const auto& param) { return std::string(param.param); });

// --- the process itself

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
  const auto tasks = [] {
    std::set<std::string> out;
    DIR* dir = opendir("/proc/self/task");
    while (const dirent* entry = readdir(dir)) {
      if (entry->d_name[0] != '.') out.insert(entry->d_name);
    }
    closedir(dir);
    return out;
  };
  const std::set<std::string> before = tasks();
  const Side one("one");
  ASSERT_TRUE(one.good());
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = "connector";
  baton_kv_connector* connector = nullptr;
  ASSERT_EQ(baton_kv_connector_create(&options, &connector, nullptr), BATON_OK);
  int made = 0;
  for (const std::string& task : tasks()) {
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
  baton_kv_connector_options options;
  baton_kv_connector_options_init(&options, sizeof options);
  options.name = "connector";
  baton_kv_connector* connector = nullptr;
  ASSERT_EQ(baton_kv_connector_create(&options, &connector, &a.error), BATON_OK);
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
    baton_kv_connector_options options;
    baton_kv_connector_options_init(&options, sizeof options);
    options.name = "connector";
    baton_kv_connector* connector = nullptr;
    EXPECT_EQ(baton_kv_connector_create(&options, &connector, nullptr), BATON_OK);
    baton_kv_connector_destroy(connector);
  };
  for (int i = 0; i < 3; ++i) round();
  const size_t descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task"),
               names = entries("/dev/shm");
  for (int i = 0; i < 30; ++i) round();
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(entries("/proc/self/task"), threads);
  EXPECT_EQ(entries("/dev/shm"), names);
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
    baton_kv_connector_options options;
    baton_kv_connector_options_init(&options, sizeof options);
    options.name = "connector";
    baton_kv_connector* connector = nullptr;
    EXPECT_EQ(baton_kv_connector_create(&options, &connector, &a.error), BATON_OK);
    // Its thread's first look, and what happened so far.
    EXPECT_EQ(baton_kv_connector_wait(connector, kLong, nullptr), BATON_OK);
    while (baton_kv_connector_wait(connector, 1'000'000, nullptr) == BATON_OK) {
    }
    const auto began = Clock::now();
    EXPECT_EQ(baton_kv_connector_wait(connector, 50'000'000, nullptr), BATON_ERR_TIMEOUT);
    EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(50));
    baton_kv_connector_destroy(connector);
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &old, nullptr);
  EXPECT_GT(rung, 10);
}

// Whatever its parent's threads were doing when it was forked.
TEST(Process, AForkedChildMakesAgentsOfItsOwn) {
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 3; ++i) {
    busy.emplace_back([&] {
      while (!over) {
        if (!two_agents_work()) over = true;
      }
    });
  }
  for (int i = 0; i < 20 && !over; ++i) {
    Child child([](int, int) { return two_agents_work() ? 0 : 1; });
    EXPECT_EQ(child.ends(), 0) << "child " << i;
  }
  EXPECT_FALSE(over.exchange(true)) << "the parent's own agents failed";
  for (std::thread& thread : busy) thread.join();
}

// --- those beside it

TEST_P(Beside, APeerIsKilledBeforeAnything) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  Side here("here", GetParam());
  ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
  const uint64_t there = number(child.hear());
  const baton_transfer first = here.make(BATON_WRITE, "peer", there);
  ASSERT_NE(first, 0U) << here.error.text;
  child.kill_it();
  int32_t result = baton_transfer_post(here.agent, first, nullptr, 0, &here.error);
  if (result >= 0) result = baton_transfer_wait(here.agent, first, kLong, &here.error);
  EXPECT_TRUE(result == BATON_ERR_REMOTE_DISCONNECT || result == BATON_ERR_NOT_FOUND)
      << baton_result_name(result) << ": " << here.error.text;
  const int32_t released = baton_transfer_release(here.agent, first, kLong, &here.error);
  EXPECT_TRUE(released == BATON_OK || released == BATON_ERR_REMOTE_DISCONNECT) << here.error.text;
}

// SIGPIPE would end this process.
TEST_P(Beside, APeerIsKilledInFlight) {
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    Child child([](int in, int out) { return peer(GetParam(), in, out); });
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
    const uint64_t there = number(child.hear());
    ASSERT_EQ(baton_transfer_run(here.agent, here.make(op, "peer", there), kLong, &here.error),
              BATON_OK)
        << here.error.text;
    // One after the other until one of them is hit.
    std::thread killer([&] { child.kill_it(); });
    int32_t result = BATON_OK;
    while (result == BATON_OK) {
      const baton_transfer next = here.make(op, "peer", there);
      ASSERT_NE(next, 0U) << here.error.text;
      result = baton_transfer_run(here.agent, next, kLong, &here.error);
      EXPECT_EQ(baton_transfer_state(here.agent, next, nullptr), BATON_ERR_NOT_FOUND);
    }
    killer.join();
    EXPECT_EQ(result, BATON_ERR_REMOTE_DISCONNECT) << here.error.text;
    if (op == BATON_READ) {
      EXPECT_EQ(here.memory()[kBytes - 1], 'p');
    }
    EXPECT_EQ(baton_notify(here.agent, "peer", "x", 1, &here.error) >= 0 || here.error.text[0] != 0,
              true);
  }
}

TEST_P(Beside, APeerIsKilledBeforeItReadsAMessage) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  Side here("here", GetParam());
  ASSERT_TRUE(here.meet(child.hear())) << here.error.text;
  const uint64_t there = number(child.hear());
  ASSERT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_WRITE, "peer", there), kLong, &here.error),
      BATON_OK)
      << here.error.text;
  child.stop();
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(baton_notify(here.agent, "peer", "text", 4, &here.error), BATON_OK);
  }
  child.kill_it();
  // Each is told as lost, for nobody confirmed it; but over shm this side alone puts them into the
  // other's memory, and may have them as done.
  const int unconfirmed = std::string(GetParam()) == "tcp" ? 5 : 0;
  const int fd = baton_agent_event_fd(here.agent);
  baton_agent_stats stats{};
  stats.size = sizeof stats;
  do {
    pollfd one{fd, POLLIN, 0};
    ASSERT_EQ(poll(&one, 1, 60'000), 1) << "the event never came";
    uint64_t events = 0;
    ASSERT_EQ(read(fd, &events, sizeof events), 8);
    ASSERT_EQ(baton_agent_get_stats(here.agent, &stats, &here.error), BATON_OK);
  } while (stats.peers_lost == 0 || stats.messages_lost < uint64_t(unconfirmed));
  int lost = 0;
  baton_bytes to{}, message{}, why{};
  while (baton_next_lost_message(here.agent, &to, &message, &why, &here.error) == BATON_OK) {
    EXPECT_STREQ(to.data, "peer");
    EXPECT_STREQ(message.data, "text");
    EXPECT_GT(why.size, 0U);
    for (baton_bytes* each : {&to, &message, &why}) baton_bytes_free(each);
    ++lost;
  }
  EXPECT_GE(lost, unconfirmed);
  EXPECT_LE(lost, 5);
}

// It neither ends nor answers: what is run has its time, and is over.
TEST_P(Beside, APeerIsStopped) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  const std::string metadata = child.hear();
  const uint64_t there = number(child.hear());
  {
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(metadata)) << here.error.text;
    ASSERT_EQ(
        baton_transfer_run(here.agent, here.make(BATON_READ, "peer", there), kLong, &here.error),
        BATON_OK)
        << here.error.text;
    child.stop();
    const baton_transfer kept = here.make(BATON_WRITE, "peer", there);
    ASSERT_GE(baton_transfer_post(here.agent, kept, nullptr, 0, &here.error), 0);
    const int32_t waited = baton_transfer_wait(here.agent, kept, 20'000'000, &here.error);
    // Over shm one side does all of it, if the notification has room.
    EXPECT_TRUE(waited == BATON_ERR_TIMEOUT || waited == BATON_OK) << baton_result_name(waited);
    const int32_t released = baton_transfer_release(here.agent, kept, 20'000'000, &here.error);
    EXPECT_TRUE(released == BATON_ERR_TIMEOUT || released == BATON_OK)
        << baton_result_name(released) << ": " << here.error.text;
    const baton_transfer run = here.make(BATON_READ, "peer", there);
    const int32_t ran = baton_transfer_run(here.agent, run, 20'000'000, &here.error);
    EXPECT_TRUE(ran == BATON_ERR_TIMEOUT || ran == BATON_OK || ran == BATON_ERR_REMOTE_DISCONNECT)
        << baton_result_name(ran) << ": " << here.error.text;
    EXPECT_EQ(baton_transfer_state(here.agent, run, nullptr), BATON_ERR_NOT_FOUND);
    here.unmap();  // nothing of it moves here any more? see below
  }                // and the agent goes, whatever the peer does
  child.go_on();
  Side again("again", GetParam());
  ASSERT_TRUE(again.meet(metadata)) << again.error.text;
  EXPECT_EQ(
      baton_transfer_run(again.agent, again.make(BATON_WRITE, "peer", there), kLong, &again.error),
      BATON_OK)
      << again.error.text;
  child.let_end();
  EXPECT_EQ(child.ends(), 0);
}

// Its own memory, and the other's, is unmapped under a list: an error, and no crash on any side.
TEST_P(Beside, MemoryIsUnmappedUnderAList) {
  Child child([](int in, int out) { return peer(GetParam(), in, out); });
  const std::string metadata = child.hear();
  const uint64_t there = number(child.hear());
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    Side here("here", GetParam());
    ASSERT_TRUE(here.meet(metadata)) << here.error.text;
    const baton_transfer transfer = here.make(op, "peer", there);
    ASSERT_NE(transfer, 0U);
    here.unmap();
    EXPECT_LT(baton_transfer_run(here.agent, transfer, kLong, &here.error), 0);
    EXPECT_STRNE(here.error.text, "");
  }
  child.let_end();
  EXPECT_EQ(child.ends(), 0) << "the peer's process lives";
}

TEST_P(Beside, ThePeersMemoryIsUnmappedUnderAList) {
  Side here("here", GetParam()), other("other", GetParam());
  ASSERT_TRUE(here.meet(other.metadata())) << here.error.text;
  const auto there = reinterpret_cast<uint64_t>(other.memory());
  ASSERT_EQ(
      baton_transfer_run(here.agent, here.make(BATON_WRITE, "other", there), kLong, &here.error),
      BATON_OK);
  other.unmap();
  for (const int32_t op : {BATON_WRITE, BATON_READ}) {
    EXPECT_LT(baton_transfer_run(here.agent, here.make(op, "other", there), kLong, &here.error), 0)
        << op;
  }
}

// A child reads what this process has, again and again; the agent goes and the memory with it.
TEST_P(Beside, MemoryMayGoWithItsAgent) {
  int share[2];
  ASSERT_EQ(pipe(share), 0);
  Child child([&](int in, int out) {
    char text[65536];
    uint64_t at = 0;
    Side reader("reader", GetParam());
    if (read(share[0], &at, sizeof at) != sizeof at) return 2;
    const ssize_t size = read(share[0], text, sizeof text);
    if (!reader.good() || size <= 0 || !reader.meet(std::string(text, size_t(size)))) return 3;
    int32_t result = BATON_OK;
    for (int done = 0; result == BATON_OK; ++done) {
      memset(reader.memory(), 0, kBytes);
      const baton_transfer next = reader.make(BATON_READ, "owner", at);
      result = baton_transfer_run(reader.agent, next, kLong, &reader.error);
      if (result == BATON_OK) {
        for (size_t i = 0; i < kBytes; ++i) {
          if (reader.memory()[i] != 'o') return 4;
        }
      }
      if (done == 3) say(out, "reads");
    }
    wait_for_end(in);
    return 0;
  });
  {
    Side owner("owner", GetParam());
    ASSERT_TRUE(owner.good());
    memset(owner.memory(), 'o', kBytes);
    const auto at = reinterpret_cast<uint64_t>(owner.memory());
    const std::string metadata = owner.metadata();
    ASSERT_EQ(write(share[1], &at, sizeof at), ssize_t(sizeof at));
    ASSERT_EQ(write(share[1], metadata.data(), metadata.size()), ssize_t(metadata.size()));
    ASSERT_EQ(child.hear(), "reads");
  }
  child.let_end();
  EXPECT_EQ(child.ends(), 0);
  close(share[0]);
  close(share[1]);
}

// 10,000 messages to one who reads none: each is taken, or refused and said so; none is lost.
TEST_P(Beside, MessagesAreKeptForWhoDoesNotRead) {
  constexpr int kMany = 10'000;
  Side here("here", GetParam()), other("other", GetParam());
  ASSERT_TRUE(here.meet(other.metadata())) << here.error.text;
  int sent = 0, refused = 0;
  for (int i = 0; i < kMany; ++i) {
    const std::string text = std::to_string(sent) + std::string(500, '.');
    const int32_t result = baton_notify(here.agent, "other", text.data(), text.size(), &here.error);
    if (result == BATON_OK) {
      ++sent;
    } else {
      ASSERT_EQ(result, BATON_ERR_BACKEND) << here.error.text;
      ++refused;
    }
  }
  EXPECT_GT(sent, 0);
  for (int i = 0; i < sent; ++i) {
    baton_bytes text{};
    ASSERT_EQ(baton_wait_message(other.agent, kLong, nullptr, &text, &other.error), BATON_OK) << i;
    ASSERT_EQ(std::string(text.data).substr(0, std::to_string(i).size() + 1),
              std::to_string(i) + ".");
    baton_bytes_free(&text);
  }
  EXPECT_EQ(baton_next_message(other.agent, nullptr, nullptr, &other.error), BATON_ERR_NOT_FOUND);
}

// Two threads post, wait for and release one transfer: each call ends, and one of them releases.
TEST_P(Beside, OneTransferIsManyThreads) {
  Side here("here", GetParam()), other("other", GetParam());
  ASSERT_TRUE(here.meet(other.metadata())) << here.error.text;
  const auto there = reinterpret_cast<uint64_t>(other.memory());
  for (int i = 0; i < 100; ++i) {
    const baton_transfer one = here.make(BATON_WRITE, "other", there, 4096);
    std::atomic<int> posted{0}, released{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        const int32_t post = baton_transfer_post(here.agent, one, nullptr, 0, nullptr);
        // Not allowed: it is being released.
        EXPECT_TRUE(post >= 0 || post == BATON_ERR_REPOST_ACTIVE || post == BATON_ERR_NOT_FOUND ||
                    post == BATON_ERR_NOT_ALLOWED)
            << baton_result_name(post);
        posted += post >= 0 ? 1 : 0;
        const int32_t waited = baton_transfer_wait(here.agent, one, kLong, nullptr);
        EXPECT_TRUE(waited == BATON_OK || waited == BATON_ERR_CANCELED ||
                    waited == BATON_ERR_NOT_FOUND)
            << baton_result_name(waited);
        const int32_t release = baton_transfer_release(here.agent, one, kLong, nullptr);
        EXPECT_TRUE(release == BATON_OK || release == BATON_ERR_NOT_FOUND)
            << baton_result_name(release);
        released += release == BATON_OK ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(posted, 1);
    EXPECT_GE(released, 1);
    EXPECT_EQ(baton_transfer_state(here.agent, one, nullptr), BATON_ERR_NOT_FOUND);
  }
  baton_agent_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(baton_agent_get_stats(here.agent, &stats, nullptr), BATON_OK);
  EXPECT_EQ(stats.transfers, 0U);
}

// Who has the same key, and is somebody else on this machine.
TEST(Process, AnotherUserIsAPeer) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be somebody else";
  char folder[] = "/tmp/baton-capi-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  ASSERT_EQ(chmod(folder, 0755), 0);
  const std::string mine = std::string(folder) + "/mine", theirs = std::string(folder) + "/theirs";
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
  for (const std::string& path : {mine, theirs}) unlink(path.c_str());
  rmdir(folder);
}

}  // namespace
