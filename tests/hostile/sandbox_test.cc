// What a sandbox refuses: a system call that a filter forbids, files that may not grow. Whatever
// can be done without it is done, over whichever provider, and the rest says what allows it. Each
// case has a process of its own, since there is no way back.
#include <iostream>

#include "absl/strings/ascii.h"
#include "collectives/rendezvous.h"
#include "kvtransfer/store/lm_server.h"
#include "kvtransfer/tiers/tier_store.h"
#include "tests/forbidden_calls.h"
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/pool.h"
#include "transport/worker.h"

namespace baton {
namespace {

constexpr size_t kSandboxBytes = 300'000;
constexpr int kNotPermitted = 77;

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
  std::vector<long> calls = {};   // that fail
  int error = 0;                  // ... with this one
  std::vector<const char*> says;  // explain(), or where `fails` the error
  bool fails = false;
  absl::Status (*instead)() = nullptr;  // of an exchange
  std::vector<std::string> providers = {"shm", "tcp"};
  rlim_t file_bytes = RLIM_INFINITY;

  // In the process; false: it is not permitted.
  bool begin() const {
    const rlimit limit{file_bytes, file_bytes};
    if (file_bytes != RLIM_INFINITY && setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    return calls.empty() || forbid(calls, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error));
  }
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
  static constexpr const char* kTcp = "tcp 127.0.0.1";
  static const std::vector<long> cma = {SYS_process_vm_readv, SYS_process_vm_writev};
  static const std::vector<long> memfd = {SYS_memfd_create};
  static const std::vector<long> eventfd = {SYS_eventfd2}, epoll = {SYS_epoll_create1};
  static const std::vector<Case> all = {
      {.what = "nothing", .says = {"by CMA"}},
      {"process_vm_*",
       cma,
       EPERM,
       {kTcp, "for memory that shm does not reach", "seccomp", "process_vm_readv"}},
      {"process_vm_* hidden", cma, ENOSYS, {kTcp, "seccomp"}},
      {"process_vm_writev", {cma[1]}, EPERM, {kTcp, "seccomp", "process_vm_writev"}},
      {"process_vm_*, with shm alone",
       cma,
       EPERM,
       {"shm cannot reach the remote region", "seccomp", "No other route does"},
       true,
       nullptr,
       {"shm"}},
      {"memfd_create", memfd, EPERM, {kTcp, "memfd_create", "seccomp"}},
      {"memfd_create hidden", memfd, ENOSYS, {kTcp, "memfd_create", "seccomp"}},
      {.what = "files of 0 bytes", .says = {kTcp, "ulimit -f"}, .file_bytes = 0},
      {.what = "files of 1 MiB", .says = {kTcp, "ulimit -f"}, .file_bytes = 1 << 20},
      {"eventfd", eventfd, EPERM, {"eventfd", "seccomp"}, true},
      {"eventfd, a rendezvous", eventfd, EPERM, {"eventfd", "seccomp"}, true, start_rendezvous},
      {"eventfd, KV tiers", eventfd, ENFILE, {"eventfd", "fs.file-max"}, true, open_tiers},
      {"eventfd, an LMCache server",
       eventfd,
       ENOMEM,
       {"eventfd", "ulimit -v"},
       true,
       start_lm_server},
      {"epoll, an LMCache server",
       epoll,
       EMFILE,
       {"epoll_create1", "ulimit -n"},
       true,
       start_lm_server},
      {"epoll", epoll, EPERM, {"epoll_create1", "seccomp"}, true},
      {"epoll, the machine's table of files",
       epoll,
       ENFILE,
       {"epoll_create1", "fs.file-max"},
       true},
      {"epoll, its own files", epoll, EMFILE, {"epoll_create1", "ulimit -n"}, true},
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
