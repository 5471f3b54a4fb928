// all_reduce from device to device between processes, of which one is killed or stopped at some
// step: the others hear of it in time and have their memory back; a stopped one that goes on hears
// that it is out.
#include "collectives/rendezvous.h"
#include "tests/communicator/group.h"
#include "tests/gpudirect/placed.h"
#include "tests/sanitized.h"
#include "tests/std.h"
#include "transport/base/child.h"

namespace baton {
namespace {

using gpudirect::CleanFake;
using gpudirect::InstalledFake;

constexpr int kDyingRanks = 3;

struct Fate {
  int rank = 0;
  uint64_t step = 0;  // of its calls of the driver from the first collective on; 0: none
  bool ended = false;
  int signal = SIGKILL;
};

// What was wrong; the number of steps of a rank that lived undisturbed.
std::string reduce_in_turn(Communicator& comm, InstalledFake& gpu, const Fate& fate,
                           uint64_t& steps) {
  if (absl::Status status = comm.barrier(); !status.ok()) return status.ToString();
  const uint64_t before = gpu.fake().steps();
  const bool mine = comm.rank() == fate.rank && fate.step != 0;
  if (mine) {
    gpu.fake().at_step(fate.step, fate.ended, [signal = fate.signal] { raise(signal); });
  }
  absl::Status status;
  for (const size_t bytes : {600'000, 300'004, 1'000'000}) {
    const gpudirect::DevicePointer at = gpu.fake().allocate(bytes);
    std::memset(gpu.fake().view(at, bytes), comm.rank() + 1, bytes);
    const Time begin = Clock::steady().now();
    status = comm.all_reduce(gpudirect::pointer_of<void>(at), gpudirect::pointer_of<void>(at),
                             bytes, DataType::kU8, ReduceOp::kSum);
    if (!mine && Clock::steady().now() - begin > patient(std::chrono::seconds(20))) {
      return "it took too long to hear of it: " + status.ToString();
    }
    if (!status.ok()) std::memset(gpu.fake().view(at, bytes), 77, bytes);
    gpu.fake().run_all();
    comm.progress();
    gpu.fake().run_all();
    const std::string got = gpu.fake().read(at, bytes);
    const char expected = static_cast<char>(status.ok() ? 6 : 77);
    if (got != std::string(bytes, expected)) return "bytes are wrong, or came late";
    gpu.fake().free(at);
    if (!status.ok()) break;
  }
  if (fate.step == 0 && !status.ok()) return status.ToString();
  gpu.fake().at_step(0, false, nullptr);
  steps = gpu.fake().steps() - before;
  return "";
}

// As a process of its own.
pid_t rank_of_its_own(int rank, const Fate& fate, int in, int out) {
  const pid_t child = base::fork_child();
  if (child != 0) return child;
  char address[64] = "";
  if (read(in, address, sizeof address) <= 0) _exit(3);
  CommunicatorOptions own = test_options("shm");
  own.tune = false;
  own.worker.settings = {{"staging.ring_mib", "16"}};
  // Who is killed is seen to be gone; who is stopped is waited for, as is who is only slow.
  if (fate.signal == SIGSTOP) {
    own.timeout = patient(std::chrono::milliseconds(300));
    own.worker.settings.emplace_back("shm.fence_ms", "100");
  }
  own.rank = rank;
  own.ranks = kDyingRanks;
  own.rendezvous = address;
  std::string wrong;
  uint64_t steps = 0;
  {
    CleanFake gpu({.seed = static_cast<uint64_t>(rank) + 1, .memory_bytes = size_t{1} << 30},
                  with_kernels());
    auto comm = Communicator::create(own);
    wrong = comm.ok() ? reduce_in_turn(**comm, gpu, fate, steps) : comm.status().ToString();
  }
  if (testing::Test::HasFailure()) wrong += " not clean";
  if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
  if (rank == fate.rank && write(out, &steps, sizeof steps) < 0) _exit(4);
  _exit(wrong.empty() ? 0 : 1);
}

// How many steps the rank made that was left alone.
uint64_t run_ranks(const Fate& fate) {
  int to[2], from[2];
  EXPECT_EQ(pipe(to) + pipe(from), 0);
  std::vector<pid_t> children;
  for (int rank = 0; rank < kDyingRanks; ++rank) {
    children.push_back(rank_of_its_own(rank, fate, to[0], from[1]));
  }
  {
    auto server = *collectives::RendezvousServer::start(test_key(), "", 0, kDyingRanks);
    char address[64] = "";
    std::strncpy(address, server->address().c_str(), sizeof address - 1);
    for (int i = 0; i < kDyingRanks; ++i) {
      EXPECT_EQ(write(to[1], address, sizeof address), static_cast<ssize_t>(sizeof address));
    }
    for (int rank = 0; rank < kDyingRanks; ++rank) {
      if (rank == fate.rank && fate.step != 0) continue;
      int status = 0;
      EXPECT_EQ(waitpid(children[rank], &status, 0), children[rank]);
      EXPECT_EQ(status, 0) << "rank " << rank;
    }
  }
  uint64_t steps = 0;
  if (fate.step != 0) {
    const pid_t child = children[fate.rank];
    int status = 0;
    do {  // it may come to its step when all others have ended
      kill(child, SIGCONT);
      EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
    } while (WIFSTOPPED(status));
    EXPECT_TRUE(status == 0 || (fate.signal == SIGKILL && WIFSIGNALED(status))) << status;
  } else {
    EXPECT_EQ(read(from[0], &steps, sizeof steps), static_cast<ssize_t>(sizeof steps));
  }
  for (const int fd : {to[0], to[1], from[0], from[1]}) close(fd);
  return steps;
}

class ExchangeDeaths : public testing::TestWithParam<int> {};

TEST_P(ExchangeDeaths, EndItAtEveryRankWhereverItWas) {
  std::mt19937_64 random(static_cast<uint64_t>(GetParam()));
  const uint64_t steps = run_ranks({});
  ASSERT_GT(steps, 40u);
  const int points = kSanitized ? 3 : 4;
  for (int i = 0; i < points && !HasFailure(); ++i) {
    const Fate fate{.rank = i % kDyingRanks,
                    .step = 1 + random() % steps,
                    .ended = random() % 2 != 0,
                    .signal = GetParam()};
    SCOPED_TRACE(testing::Message() << "rank " << fate.rank << " at step " << fate.step << " of "
                                    << steps << (fate.ended ? " ended" : " begins"));
    run_ranks(fate);
  }
}

INSTANTIATE_TEST_SUITE_P(By, ExchangeDeaths, testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& signal) {
                           return signal.param == SIGKILL ? "Killed" : "Stopped";
                         });

}  // namespace
}  // namespace baton
