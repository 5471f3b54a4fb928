// What a sandbox refuses: a system call that a filter forbids, files that may not grow. Whatever
// can be done without it is done, over whichever provider, and the rest says what allows it. Each
// case has a process of its own, since there is no way back.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <iostream>

#include "absl/strings/ascii.h"
#include "collectives/rendezvous.h"
#include "kvtransfer/store/lm_server.h"
#include "kvtransfer/tiers/tier_store.h"
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton {
namespace {

constexpr size_t kSandboxBytes = 300'000;
constexpr int kNotPermitted = 77;

// From now on these calls of this process fail with `error`.
bool forbid(std::initializer_list<int> calls, int error) {
  std::vector<sock_filter> filter = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const int call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

bool limit_files(rlim_t bytes) {
  const rlimit limit{bytes, bytes};
  return setrlimit(RLIMIT_FSIZE, &limit) == 0;
}

absl::StatusOr<std::unique_ptr<Worker>> make(const char* name, std::vector<std::string> providers) {
  return Worker::create({.name = name,
                         .providers = std::move(providers),
                         .key = *ClusterKey::from_bytes("0123456789abcdef"),
                         .settings = {{"tcp.integrity", "on"}}});
}

// A write and a read between ordinary memory and a block of a pool, and the other way round; what
// explain() says in the end.
absl::StatusOr<std::string> exchange(const std::vector<std::string>& providers) {
  auto a = make("a", providers);
  if (!a.ok()) return a.status();
  auto b = make("b", providers);
  if (!b.ok()) return b.status();
  auto pool = MemoryPool::create(**b, {.slab_bytes = 4 << 20});
  if (!pool.ok()) return pool.status();
  auto block = (*pool)->allocate(kSandboxBytes);
  if (!block.ok()) return block.status();
  std::vector<char> near(2 * kSandboxBytes), far(kSandboxBytes);
  const MemoryRegion local = *(*a)->register_memory(near.data(), near.size(), Access::kLocal);
  const MemoryRegion ordinary =
      *(*b)->register_memory(far.data(), far.size(), Access::kRemoteReadWrite);
  const PeerId peer = *(*a)->connect((*b)->address());
  for (const auto& [region, offset, bytes] :
       {std::tuple{block->region, block->offset, reinterpret_cast<char*>(block->data)},
        std::tuple{ordinary, size_t{0}, far.data()}}) {
    for (size_t i = 0; i < kSandboxBytes; ++i) near[i] = static_cast<char>(i * 7 + i / 251);
    for (const Op op : {Op::kWrite, Op::kRead}) {
      const auto id = (*a)->submit(
          {.op = op,
           .peer = peer,
           .local = local,
           .local_layout = Layout::contiguous(op == Op::kWrite ? 0 : kSandboxBytes, kSandboxBytes),
           .remote = *(*b)->remote_region(region),
           .remote_layout = Layout::contiguous(offset, kSandboxBytes),
           .timeout = std::chrono::minutes(1)});
      if (!id.ok()) return id.status();
      while (!ended(*(*a)->state(*id))) {
        (*a)->progress();
        (*b)->progress();
      }
      if (absl::Status status = (*a)->status(*id); !status.ok()) return status;
    }
    if (std::memcmp(near.data(), bytes, kSandboxBytes) != 0 ||
        std::memcmp(near.data() + kSandboxBytes, bytes, kSandboxBytes) != 0) {
      return absl::DataLossError("other bytes");
    }
  }
  return (*a)->explain(peer);
}

struct Case {
  const char* what;
  std::function<bool()> begin;  // in the process; false: it is not permitted
  std::vector<std::string> providers;
  std::vector<const char*> says;  // explain(), or where `fails` the error
  bool fails = false;
  std::function<absl::Status()> instead = nullptr;  // of an exchange
};

absl::Status start_rendezvous() {
  return collectives::RendezvousServer::start(*ClusterKey::from_bytes("0123456789abcdef"),
                                              "127.0.0.1", 0, 2)
      .status();
}
absl::Status start_lm_server() {
  std::vector<std::byte> memory(1 << 20);
  kvtransfer::store::BlockArena arena(memory, kvtransfer::tiers::kPage);
  return kvtransfer::store::LmServer::start({}, arena).status();
}
absl::Status open_tiers() {
  std::vector<std::byte> memory(1 << 20);
  return kvtransfer::tiers::TierStore::open(
             {.cache = {.base = memory.data(), .layers = 2, .blocks = 8, .block_bytes = 4096},
              .host_bytes = 1 << 20})
      .status();
}

const std::vector<Case>& cases() {
  static const std::vector<std::string> both = {"shm", "tcp"};
  static const std::vector<Case> all = {
      {"nothing", [] { return true; }, both, {"by CMA"}},
      {"process_vm_*",
       [] {
         return forbid({SYS_process_vm_readv, SYS_process_vm_writev}, EPERM);
       },
       both,
       {"tcp 127.0.0.1", "for memory that shm does not reach", "seccomp", "process_vm_readv"}},
      {"process_vm_* hidden",
       [] {
         return forbid({SYS_process_vm_readv, SYS_process_vm_writev}, ENOSYS);
       },
       both,
       {"tcp 127.0.0.1", "seccomp"}},
      {"process_vm_writev",
       [] { return forbid({SYS_process_vm_writev}, EPERM); },
       both,
       {"tcp 127.0.0.1", "seccomp", "process_vm_writev"}},
      {"process_vm_*, with shm alone",
       [] {
         return forbid({SYS_process_vm_readv, SYS_process_vm_writev}, EPERM);
       },
       {"shm"},
       {"shm cannot reach the remote region", "seccomp", "No other route does"},
       true},
      {"memfd_create",
       [] { return forbid({SYS_memfd_create}, EPERM); },
       both,
       {"tcp 127.0.0.1", "memfd_create", "seccomp"}},
      {"memfd_create hidden",
       [] { return forbid({SYS_memfd_create}, ENOSYS); },
       both,
       {"tcp 127.0.0.1", "memfd_create", "seccomp"}},
      {"files of 0 bytes", [] { return limit_files(0); }, both, {"tcp 127.0.0.1", "ulimit -f"}},
      {"files of 1 MiB", [] { return limit_files(1 << 20); }, both, {"tcp 127.0.0.1", "ulimit -f"}},
      {"eventfd", [] { return forbid({SYS_eventfd2}, EPERM); }, both, {"eventfd", "seccomp"}, true},
      {"eventfd, a rendezvous",
       [] { return forbid({SYS_eventfd2}, EPERM); },
       {},
       {"eventfd", "seccomp"},
       true,
       start_rendezvous},
      {"eventfd, KV tiers",
       [] { return forbid({SYS_eventfd2}, ENFILE); },
       {},
       {"eventfd", "fs.file-max"},
       true,
       open_tiers},
      {"eventfd, an LMCache server",
       [] { return forbid({SYS_eventfd2}, ENOMEM); },
       {},
       {"eventfd", "ulimit -v"},
       true,
       start_lm_server},
      {"epoll, an LMCache server",
       [] { return forbid({SYS_epoll_create1}, EMFILE); },
       {},
       {"epoll_create1", "ulimit -n"},
       true,
       start_lm_server},
      {"epoll",
       [] { return forbid({SYS_epoll_create1}, EPERM); },
       both,
       {"epoll_create1", "seccomp"},
       true},
      {"epoll, the machine's table of files",
       [] { return forbid({SYS_epoll_create1}, ENFILE); },
       both,
       {"epoll_create1", "fs.file-max"},
       true},
      {"epoll, its own files",
       [] { return forbid({SYS_epoll_create1}, EMFILE); },
       both,
       {"epoll_create1", "ulimit -n"},
       true},
  };
  return all;
}

class Sandbox : public testing::TestWithParam<Case> {};

// Promise(memory): A sandbox that forbids a system call costs what needs the call; the error says
//   what allows it | one list of remedies by error
TEST_P(Sandbox, WhatCanBeDoneIsDoneAndTheRestSaysWhatAllowsIt) {
  const Case& one = GetParam();
  const pid_t child = base::fork_child();
  if (child == 0) {
    if (!one.begin()) _exit(kNotPermitted);
    absl::StatusOr<std::string> outcome("");
    if (one.instead == nullptr) {
      outcome = exchange(one.providers);
    } else if (absl::Status status = one.instead(); !status.ok()) {
      outcome = status;
    }
    const std::string text = outcome.ok() ? *outcome : std::string(outcome.status().message());
    bool good = outcome.ok() != one.fails;
    for (const char* word : one.says) good = good && text.find(word) != std::string::npos;
    if (!good) std::cerr << one.what << ": " << outcome.status() << "\n" << text << "\n";
    _exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "killed by " << strsignal(WTERMSIG(status));
  if (WEXITSTATUS(status) == kNotPermitted)
    GTEST_SKIP() << "this process may not forbid itself that";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(Refusals, Sandbox, testing::ValuesIn(cases()), [](const auto& each) {
  std::string name;
  for (const char c : std::string(each.param.what))
    name += absl::ascii_isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

}  // namespace
}  // namespace baton
