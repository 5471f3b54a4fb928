// Two processes and this machine's GPU: memory of one's that the other one moves, and what is left
// when one is killed in the middle of it.
#include "absl/strings/escaping.h"
#include "gpudirect/device_memory.h"
#include "tests/gpudirect/machine/waiting.h"
#include "tests/peer_process.h"
#include "tests/test.h"
#include "tests/used.h"
#include "transport/worker.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kBytes = 64 << 20;
constexpr int kKills = 50;  // of each kind of memory

// Device memory of this process, registered with a worker over shm.
struct End {
  void start(const char* name, bool shareable) {
    device = must(Device::open(*must(machine_driver()), 0));
    slab = must(DeviceSlab::create(*device, kBytes, {.rdma = false, .shareable = shareable}));
    worker = must(Worker::create({.name = name, .providers = {"shm"}}));
    region = must(worker->register_memory(pointer_of<void>(slab->span().data), kBytes));
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceSlab> slab;
  std::unique_ptr<Worker> worker;
  MemoryRegion region;
};

// The other process: this program again, with one of these alone.
void serve(bool shareable) {
  End end;
  end.start("peer", shareable);
  std::printf("address %s\nregion %s\n", absl::BytesToHexString(end.worker->address()).c_str(),
              absl::BytesToHexString(end.worker->remote_region(end.region)->encode()).c_str());
  std::fflush(stdout);
  while (getppid() != 1) {
    end.worker->wait_until([] { return false; }, std::chrono::milliseconds(100)).IgnoreError();
  }
}
TEST(PeerOnThisMachine, DISABLED_Shares) { serve(true); }
TEST(PeerOnThisMachine, DISABLED_SharesNothing) { serve(false); }

struct Peer {
  explicit Peer(bool shareable)
      : process(std::filesystem::read_symlink("/proc/self/exe").c_str(),
                {std::string("--gtest_filter=PeerOnThisMachine.DISABLED_Shares") +
                     (shareable ? "" : "Nothing"),
                 "--gtest_also_run_disabled_tests"}) {
    const auto said = [&](const std::string& what) {
      std::string line;
      do {
        line = process.line();
        if (line.starts_with(what)) return absl::HexStringToBytes(line.substr(what.size()));
      } while (!line.empty());
      return line;
    };
    address = said("address ");
    remote = RemoteRegion::decode(said("region ")).value_or(RemoteRegion());
  }
  PeerProcess process;
  std::string address;
  RemoteRegion remote;
};

class ProcessesOnThisMachine : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const auto driver = machine_driver(); !driver.ok())
      GTEST_SKIP() << driver.status().message();
    end_.start("here", true);
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
    if (i == 1) descriptors = entries_of("/proc/self/fd");  // what is made once is there
    Peer peer(GetParam());
    ASSERT_FALSE(peer.address.empty()) << "it did not start";
    const PeerId id = *end_.worker->connect(peer.address);
    const auto whole = must(write(id, peer.remote));
    ASSERT_EQ(end_.worker->wait(whole), absl::OkStatus());
    if (i == 0) std::printf("%s\n", end_.worker->explain(id).c_str());
    const auto cut = must(write(id, peer.remote));
    // Dense where a transfer begins, and past the end of a quick one.
    const int step = i % 20;
    for (int round = 0; round < step * step + i / 20; ++round) end_.worker->progress();
    peer.process.kill_it();
    const absl::Status status = end_.worker->wait(cut, kRigPatience);
    EXPECT_FALSE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_TRUE(end_.worker
                    ->wait_until([&] { return end_.worker->peer_state(id) == PeerState::kDown; },
                                 kRigPatience)
                    .ok());
  }
  EXPECT_LE(entries_of("/proc/self/fd"), descriptors);
  // The device does everything still.
  must(DeviceSlab::create(*end_.device, kBytes));
  EXPECT_TRUE(end_.worker->deregister_memory(end_.region).ok());
}

INSTANTIATE_TEST_SUITE_P(Memory, ProcessesOnThisMachine, testing::Values(true, false),
                         [](const auto& each) { return each.param ? "Shared" : "Staged"; });

}  // namespace
}  // namespace baton::gpudirect
