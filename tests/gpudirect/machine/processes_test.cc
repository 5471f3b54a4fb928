// Two processes and this machine's GPU: memory of one's that the other one moves, and what is left
// when one is killed in the middle of it.
#include <spawn.h>

#include "absl/strings/escaping.h"
#include "gpudirect/device_memory.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::gpudirect {
namespace {

constexpr const char* kShareable = "BATON_TEST_PEER_SHAREABLE";
constexpr size_t kBytes = 64 << 20;
constexpr int kKills = 50;  // of each kind of memory

// Device memory of this process, registered with a worker over shm.
struct End {
  absl::Status start(const char* name, bool shareable) {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) return driver.status();
    auto opened = Device::open(**driver, 0);
    if (!opened.ok()) return opened.status();
    device = *std::move(opened);
    auto made = DeviceSlab::create(*device, kBytes, {.rdma = false, .shareable = shareable});
    if (!made.ok()) return made.status();
    slab = *std::move(made);
    auto created = Worker::create({.name = name, .providers = {"shm"}});
    if (!created.ok()) return created.status();
    worker = *std::move(created);
    const auto registered = worker->register_memory(
        reinterpret_cast<void*>(static_cast<uintptr_t>(slab->span().data)), kBytes);
    if (!registered.ok()) return registered.status();
    region = *registered;
    return absl::OkStatus();
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceSlab> slab;
  std::unique_ptr<Worker> worker;
  MemoryRegion region;
};

// The other process: this program again, with this test alone.
TEST(PeerOnThisMachine, DISABLED_Serves) {
  End end;
  const absl::Status status = end.start("peer", std::getenv(kShareable) != nullptr);
  ASSERT_TRUE(status.ok()) << status;
  std::printf("peer %s %s\n", absl::BytesToHexString(end.worker->address()).c_str(),
              absl::BytesToHexString(end.worker->remote_region(end.region)->encode()).c_str());
  std::fflush(stdout);
  while (getppid() != 1) {
    end.worker->wait_until([] { return false; }, std::chrono::milliseconds(100)).IgnoreError();
  }
}

class Peer {
 public:
  explicit Peer(bool shareable) {
    int fds[2];
    EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
    std::string self = std::filesystem::read_symlink("/proc/self/exe");
    std::string filter = "--gtest_filter=PeerOnThisMachine.*";
    std::string also = "--gtest_also_run_disabled_tests";
    char* arguments[] = {self.data(), filter.data(), also.data(), nullptr};
    std::vector<char*> variables;
    for (char** each = environ; *each != nullptr; ++each) variables.push_back(*each);
    std::string shares = std::string(kShareable) + "=1";
    if (shareable) variables.push_back(shares.data());
    variables.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, self.c_str(), &actions, nullptr, arguments, variables.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    FILE* const words = fdopen(fds[0], "r");
    char line[8192];
    while (std::fgets(line, sizeof line, words) != nullptr) {
      char where[4096], what[1024];
      if (std::sscanf(line, "peer %4095s %1023s", where, what) != 2) continue;
      address = absl::HexStringToBytes(where);
      auto region = RemoteRegion::decode(absl::HexStringToBytes(what));
      if (region.ok()) remote = *region;
      break;
    }
    std::fclose(words);
  }
  ~Peer() { stop(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  void stop() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  std::string address;
  RemoteRegion remote;

 private:
  pid_t pid_ = -1;
};

size_t open_descriptors() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                           std::filesystem::directory_iterator()));
}

class ProcessesOnThisMachine : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const auto driver = machine_driver(); !driver.ok())
      GTEST_SKIP() << driver.status().message();
    const absl::Status status = end_.start("here", true);
    ASSERT_TRUE(status.ok()) << status;
  }
  absl::StatusOr<TransferId> write(PeerId peer, const RemoteRegion& remote) {
    return end_.worker->submit({.peer = peer,
                                .local = end_.region,
                                .local_layout = Layout::contiguous(0, kBytes),
                                .remote = remote,
                                .remote_layout = Layout::contiguous(0, kBytes),
                                .timeout = kRigPatience});
  }
  End end_;
};

// Killed at a moment that is another one each time. A peer that is gone ends its transfers, and
// leaves neither a descriptor nor memory of the device behind.
TEST_P(ProcessesOnThisMachine, AKilledPeerEndsItsTransfersAndLeavesNothing) {
  size_t descriptors = 0;
  for (int i = 0; i < kKills; ++i) {
    SCOPED_TRACE(i);
    Peer peer(GetParam());
    ASSERT_FALSE(peer.address.empty()) << "it did not start";
    const PeerId id = *end_.worker->connect(peer.address);
    const auto whole = write(id, peer.remote);
    ASSERT_TRUE(whole.ok()) << whole.status();
    const absl::Status moved = end_.worker->wait(*whole);
    ASSERT_TRUE(moved.ok()) << moved;
    if (i == 0) {
      std::printf("%s\n", end_.worker->explain(id).c_str());
      descriptors = open_descriptors();
    }
    const auto cut = write(id, peer.remote);
    ASSERT_TRUE(cut.ok()) << cut.status();
    // Dense where a transfer begins, and past the end of a quick one.
    const int step = i % 20;
    for (int round = 0; round < step * step + i / 20; ++round) end_.worker->progress();
    peer.stop();
    const absl::Status status = end_.worker->wait(*cut, kRigPatience);
    EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_TRUE(end_.worker
                    ->wait_until([&] { return end_.worker->peer_state(id) == PeerState::kDown; },
                                 kRigPatience)
                    .ok());
  }
  EXPECT_LE(open_descriptors(), descriptors);
  // The device does everything still.
  const auto slab = DeviceSlab::create(*end_.device, kBytes);
  EXPECT_TRUE(slab.ok()) << slab.status();
  EXPECT_TRUE(end_.worker->deregister_memory(end_.region).ok());
}

INSTANTIATE_TEST_SUITE_P(Memory, ProcessesOnThisMachine, testing::Values(true, false),
                         [](const auto& each) { return each.param ? "Shared" : "Staged"; });

}  // namespace
}  // namespace baton::gpudirect
