// A peer dies, and another process has its number before the copy: no byte of that one is written,
// and none that was read is used. In a pid namespace of the test's own, where it says which number
// a child has.
#include <linux/sched.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "tests/sanitized.h"
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/base/unique_fd.h"
#include "transport/shm/cma.h"

namespace {
// Called before the kernel is: where a process would have been stopped for long.
std::function<void()>& before_the_copy() {
  static std::function<void()> hook;
  return hook;
}
}  // namespace

extern "C" {
ssize_t process_vm_readv(pid_t pid, const iovec* to, unsigned long parts, const iovec* from,
                         unsigned long from_parts, unsigned long flags) noexcept {
  if (const auto hook = std::exchange(before_the_copy(), nullptr)) hook();
  return syscall(SYS_process_vm_readv, pid, to, parts, from, from_parts, flags);
}
ssize_t process_vm_writev(pid_t pid, const iovec* from, unsigned long parts, const iovec* to,
                          unsigned long to_parts, unsigned long flags) noexcept {
  if (const auto hook = std::exchange(before_the_copy(), nullptr)) hook();
  return syscall(SYS_process_vm_writev, pid, from, parts, to, to_parts, flags);
}
}  // extern "C"

namespace baton::shm {
namespace {

constexpr size_t kStrangerBytes = 8192;
constexpr int kNotPermitted = 77;

// A process with memory at the address where this one has `data`, and what it tells of itself.
struct Process {
  pid_t pid = 0;
  base::UniqueFd process, told, done;

  // Of number `pid` where that is not 0. `prepare` runs in it, and what it returns is read by
  // hear().
  static Process start(pid_t pid, const std::function<std::array<uint8_t, 24>()>& prepare) {
    int up[2], down[2];
    if (pipe(up) != 0 || pipe(down) != 0) return {};
    clone_args args{};
    args.exit_signal = SIGCHLD;
    args.set_tid = pid != 0 ? reinterpret_cast<uint64_t>(&pid) : 0;
    args.set_tid_size = pid != 0 ? 1 : 0;
    Process made;
    made.pid = static_cast<pid_t>(syscall(SYS_clone3, &args, sizeof args));
    if (made.pid == 0) {
      close(up[0]);
      close(down[1]);
      const auto words = prepare();
      if (write(up[1], words.data(), words.size()) < 0) _exit(1);
      char go = 0;
      if (read(down[0], &go, 1) < 0) _exit(1);
      _exit(0);
    }
    close(up[1]);
    close(down[0]);
    made.told.reset(up[0]);
    made.done.reset(down[1]);
    if (made.pid > 0) made.process.reset(static_cast<int>(syscall(SYS_pidfd_open, made.pid, 0)));
    return made;
  }
  std::array<uint8_t, 24> hear() const {
    std::array<uint8_t, 24> words{};
    return read(told.get(), words.data(), words.size()) == ssize_t{sizeof words}
               ? words
               : decltype(words){};
  }
  void end() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }
};

// What befell a batch for a peer whose number a stranger has.
struct Outcome {
  absl::Status status;
  bool stranger_is_whole = false;
};

Process start_with_gate() {
  return Process::start(0, [] {
    static Gate gate = *Gate::create();  // stays when this has returned
    std::array<uint8_t, 24> words{};
    const uint64_t at = gate.address();
    std::memcpy(words.data(), &at, sizeof at);
    std::memcpy(words.data() + sizeof at, gate.nonce().data(), kNonceBytes);
    return words;
  });
}
CmaPeer copied_by_cma(Process& peer) {
  const auto words = peer.hear();
  CmaPeer target{.pid = peer.pid, .process = peer.process.get()};
  std::memcpy(&target.gate, words.data(), sizeof target.gate);
  std::memcpy(target.nonce.data(), words.data() + sizeof target.gate, kNonceBytes);
  return target;
}

// `between`: the peer dies before the batch; else it dies behind all that is asked, right before
// the kernel copies. `same_gate`: by the worst of luck the stranger has a page where the peer's
// gate was.
Outcome copy_to_a_stranger(Op op, bool between, bool same_gate) {
  auto* const data = static_cast<std::byte*>(
      mmap(nullptr, kStrangerBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::memset(data, 1, kStrangerBytes);
  std::vector<std::byte> near(kStrangerBytes, std::byte{5});
  Process peer = start_with_gate();
  CmaPeer target = copied_by_cma(peer);
  const absl::Status works = probe_cma(target);
  if (!works.ok()) return {works};

  Process stranger;
  const auto replace = [&] {
    const pid_t number = peer.pid;
    peer.end();
    stranger = Process::start(number, [&] {
      std::memset(data, 2, kStrangerBytes);
      if (same_gate) {
        static_cast<void>(mmap(reinterpret_cast<void*>(target.gate), 4096, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
      }
      return std::array<uint8_t, 24>{1};
    });
    stranger.hear();
  };
  CmaBatch batch;
  batch.add(near.data(), reinterpret_cast<uint64_t>(data), kStrangerBytes);
  if (between) {
    replace();
  } else {
    before_the_copy() = replace;
  }
  Outcome outcome{batch.run(target, op)};
  before_the_copy() = nullptr;
  EXPECT_EQ(stranger.pid, target.pid) << "the number was not used again";
  std::vector<std::byte> seen(kStrangerBytes);
  iovec local{seen.data(), kStrangerBytes}, remote{data, kStrangerBytes};
  EXPECT_EQ(syscall(SYS_process_vm_readv, stranger.pid, &local, 1, &remote, 1, 0),
            ssize_t{kStrangerBytes});
  outcome.stranger_is_whole = seen == std::vector<std::byte>(kStrangerBytes, std::byte{2});
  stranger.end();
  munmap(data, kStrangerBytes);
  return outcome;
}

// Runs `test` as the first process of a pid namespace, where it may give out numbers; how it ended.
int in_a_pid_namespace(const std::function<void()>& test) {
  const pid_t outer = base::fork_child();
  if (outer == 0) {
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0)
      _exit(kNotPermitted);
    const pid_t inner = fork();  // its parent has no number in there
    if (inner == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Process probe = Process::start(1000, [] { return std::array<uint8_t, 24>{1}; });
      if (probe.pid != 1000) _exit(kNotPermitted);
      probe.end();
      test();
      std::fflush(stdout);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    waitpid(inner, &status, 0);
    _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 2);
  }
  int status = 0;
  waitpid(outer, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

// Promise(memory): Over shm no byte lands in a process that reuses a dead peer's pid | each copy
//   begins with a secret page, and the pidfd is asked
TEST(StrangerPid, NoByteOfAnotherProcessIsWrittenNorUsed) {
  if (kSanitized)
    GTEST_SKIP() << "a process that clone3() gives a number has no sanitizer's threads";
  const int how = in_a_pid_namespace([] {
    for (const Op op : {Op::kWrite, Op::kRead}) {
      for (const bool between : {true, false}) {
        for (const bool same_gate : {false, true}) {
          if (op == Op::kWrite && !between && same_gate)
            continue;  // the one case that is left to chance
          const Outcome outcome = copy_to_a_stranger(op, between, same_gate);
          const std::string what = std::string(op == Op::kWrite ? "write" : "read") +
                                   (between ? ", died before" : ", died at the copy") +
                                   (same_gate ? ", with a page at the gate" : "");
          EXPECT_TRUE(absl::IsUnavailable(outcome.status)) << what << ": " << outcome.status;
          EXPECT_TRUE(outcome.stranger_is_whole) << what;
        }
      }
    }
  });
  if (how == kNotPermitted)
    GTEST_SKIP()
        << "a pid namespace whose numbers a test gives out needs CAP_SYS_ADMIN, or user namespaces";
  EXPECT_EQ(how, 0);
}

// A child has all of its parent's memory but the gate.
TEST(StrangerPid, AChildOfThePeerIsAStranger) {
  absl::StatusOr<Gate> gate = Gate::create();
  ASSERT_TRUE(gate.ok()) << gate.status();
  const CmaPeer self{.pid = getpid(), .gate = gate->address(), .nonce = gate->nonce()};
  ASSERT_TRUE(probe_cma(self).ok()) << probe_cma(self);
  Process child = Process::start(0, [] { return std::array<uint8_t, 24>{1}; });
  ASSERT_GT(child.pid, 0);
  child.hear();
  CmaPeer taken_for_it = self;
  taken_for_it.pid = child.pid;
  taken_for_it.process = child.process.get();
  std::byte here{1}, there{2};
  CmaBatch batch;
  batch.add(&here, reinterpret_cast<uint64_t>(&there), 1);
  const absl::Status status = batch.run(taken_for_it, Op::kWrite);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  child.end();
}

// Where nothing tells that a process has ended its number is no name.
TEST(StrangerPid, WithoutAPidfdThereIsNoCma) {
  Process peer = start_with_gate();
  CmaPeer target = copied_by_cma(peer);
  if (const absl::Status works = probe_cma(target); !works.ok()) {
    peer.end();
    GTEST_SKIP() << works;
  }
  target.process = -1;
  EXPECT_TRUE(absl::IsFailedPrecondition(probe_cma(target))) << probe_cma(target);
  peer.end();
}

}  // namespace
}  // namespace baton::shm
