// Ends that come early: aborts, comms that fail, threads that share the plugin.
#include "plugins/nccl/net.h"
#include "tests/fails_with.h"
#include "tests/nccl_net/rig.h"
#include "tests/temporary_folder.h"

namespace baton::nccl {
namespace {

TEST_P(BatonNet, StaleRequestsAreErrors) {
  Lane lane(rig, 1'000);
  void* const receive = lane.receive({{0, 1'000, 0}});
  void* const send = lane.send({0, 1'000, 0});
  lane.finish(send);
  lane.finish(receive);
  int done = 0;
  EXPECT_EQ(net().test(send, &done, nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().test(receive, &done, nullptr), Result::kInvalidArgument);
  EXPECT_EQ(net().test(reinterpret_cast<void*>(uintptr_t{0x1234567812345678}), &done, nullptr),
            Result::kInvalidArgument);
  // Their places have others now.
  for (int i = 0; i < 31; ++i) lane.exchange({0, 8, 0}, 0);
  void* const later = lane.receive({{0, 1'000, 0}});
  EXPECT_EQ(net().test(receive, &done, nullptr), Result::kInvalidArgument);
  void* const again = lane.send({0, 1'000, 0});
  EXPECT_EQ(net().test(send, &done, nullptr), Result::kInvalidArgument);
  lane.finish(again, nullptr, later, nullptr);
  lane.close();
  EXPECT_EQ(net().test(receive, &done, nullptr), Result::kInvalidArgument);
}

// Promise(nccl): A comm that is closed with receives posted is closed at once, and no byte of it
//   moves afterwards; the other side gets an error | receives are posted, the receiver closes, then
//   the sender sends
TEST_P(BatonNet, AReceiverThatClosesIsAnErrorAtTheSender) {
  Lane lane(rig, 64 << 10);
  for (int i = 0; i < 4; ++i) lane.receive({{0, 64 << 10, 0}});
  lane.close_receive();
  Result result = Result::kSuccess;
  until([&] {
    void* request = nullptr;
    result = net().send(lane.ends.send, lane.out.data(), 64 << 10, 0, lane.out_memory, &request);
    if (result == Result::kSuccess && request != nullptr) result = lane.fails(request);
    return result != Result::kSuccess;
  });
  EXPECT_TRUE(lane.untouched());
  for (int i = 0; i < 3; ++i) {
    void* request = nullptr;
    EXPECT_NE(net().send(lane.ends.send, lane.out.data(), 8, 0, lane.out_memory, &request),
              Result::kSuccess);
  }
  EXPECT_EQ(NetLog::lines(LogLevel::kWarn).size(), 1u) << "one line, not one for each call";
}

TEST_P(BatonNet, ASenderThatClosesIsAnErrorAtTheReceiver) {
  Lane lane(rig, 1'000);
  void* const first = lane.receive({{0, 1'000, 0}});
  void* const second = lane.receive({{0, 1'000, 0}});
  lane.finish(lane.send({0, 1'000, 0}));
  lane.close_send();
  lane.finish(first);  // it had come before
  EXPECT_EQ(lane.fails(second), Result::kRemoteError);
  EXPECT_THAT(NetLog::lines(LogLevel::kWarn), testing::SizeIs(1));
}

// NCCL aborts: everything is in flight, memory is deregistered, both ends are closed.
TEST_P(BatonNet, AbortWithEverythingInFlight) {
  for (int round = 0; round < 5; ++round) {
    Lane lane(rig, 8 << 20, round);
    for (int i = 0; i < 8; ++i) lane.receive({{size_t(i) << 20, 1 << 20, 0}});
    std::vector<void*> sends;
    for (int i = 0; i < 8 - round; ++i) sends.push_back(lane.send({size_t(i) << 20, 1 << 20, 0}));
    if (round % 2 == 0) {
      lane.close();
    } else {  // without a word about memory
      if (round == 1) lane.close_receive();
      lane.close_send();
      if (round == 3) lane.close_receive();
    }
  }
  Lane lane(rig, 1'000);
  lane.exchange({0, 1'000, 0}, 0);
}

// A sender that closes ends its sends: what was not copied by then never is.
TEST_P(BatonNet, ASenderThatClosesCopiesNothingMore) {
  if (GetParam().provider != "shm") GTEST_SKIP() << "what is on a wire may still come";
  constexpr size_t kBytes = 32 << 20;
  Lane lane(rig, kBytes);
  for (int i = 0; i < 16; ++i) lane.receive({{0, kBytes, 0}});
  for (int i = 0; i < 16; ++i) lane.send({0, kBytes, 0});
  lane.close_send();
  lane.wipe();
  for (int i = 0; i < 10'000; ++i) rig.turn();
  EXPECT_TRUE(lane.untouched());
}

// The lines that a receiver of another build, or a damaged one, writes into its sender's ring.
std::vector<Grant*> grants_with(int tag) {
  std::vector<Grant*> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" rw-s ") == std::string::npos || line.find("memfd:") == std::string::npos)
      continue;
    const auto begin = std::stoull(line, nullptr, 16);
    const auto end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    for (uint64_t at = begin; at + sizeof(Grant) <= end; at += sizeof(Grant)) {
      auto* const grant = reinterpret_cast<Grant*>(at);
      if (grant->tag == tag && grant->count == 1 && grant->bytes == 1'000) found.push_back(grant);
    }
  }
  return found;
}

// Promise(nccl): A receiver that writes nonsense into its sender's ring is an error of that comm
//   alone | the number of grants and of the group are damaged in memory
TEST_P(BatonNet, ADamagedGroupOfGrantsIsAnError) {
  if (kSanitized) GTEST_SKIP() << "the test writes where other threads do";
  for (const int damage : {0, 9, 255, -1}) {
    SCOPED_TRACE(damage);
    Lane lane(rig, 1'000), other(rig, 1'000);
    const int tag = 0x5eed1234 + damage;
    lane.receive({{0, 1'000, tag}});
    std::vector<Grant*> grants;  // as they were sent, and in the ring
    until([&] { return (grants = grants_with(tag)).size() >= 2; });
    for (Grant* const grant : grants) {
      damage < 0 ? void(++grant->group) : void(grant->count = static_cast<uint8_t>(damage));
    }
    Result result = Result::kSuccess;
    until([&] {
      void* request = nullptr;
      result = net().send(lane.ends.send, lane.out.data(), 8, tag, lane.out_memory, &request);
      return result != Result::kSuccess || request != nullptr;
    });
    EXPECT_EQ(result, Result::kInternalError);
    other.exchange({0, 1'000, 0}, 0);
  }
}

// Its sends and its receives then have a lock each, and threads that drive them.
TEST_P(BatonNet, AProcessThatCallsItselfHasTwoWorkers) {
  Lane lane(rig, 1'000);
  EXPECT_EQ(rig.workers(), 2u);
}

// Two channels of a communicator have a progress thread each; so have two communicators.
TEST_P(BatonNet, TwoPairsOfProxies) {
  constexpr size_t kStep = 30'000;
  const std::vector<Group> plan = steady(kSanitized ? 200 : 1'000, kStep);
  Lane a(rig, 8 * kStep, 1), b(rig, 8 * kStep, 2);
  Traffic of_a(a, plan), of_b(b, plan);
  run(rig, {&of_a, &of_b});
}

// Comms are opened and closed while another pair of proxies works.
TEST_P(BatonNet, CommsComeAndGoUnderTraffic) {
  if (!rig.threads()) GTEST_SKIP() << "one thread: ThousandsOfComms... and TwoPairsOfProxies";
  constexpr size_t kStep = 30'000;
  Lane lane(rig, 8 * kStep);
  Traffic traffic(lane, steady(kSanitized ? 300 : 2'000, kStep));
  std::atomic<bool> stop{false};
  std::thread service([&] {
    while (!stop) Lane(rig, 3'000).exchange({0, 3'000, 0}, 0);
  });
  run(rig, {&traffic});
  stop = true;
  service.join();
}

// --- the environment -----------------------------------------------------------------------------

class NetEnvironment : public testing::Test {
 public:
  void SetUp() override {
    NetLog::forget();
    Plugin::get().reset();
    Plugin::get().make_workers_by(nullptr, true);
  }
  void TearDown() override {
    for (const char* name : {"NCCL_SOCKET_IFNAME", "BATON_NCCL_PROVIDERS", "BATON_NCCL_SET",
                             "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE"}) {
      unsetenv(name);
    }
    Plugin::get().reset();
  }
  static absl::Status open() { return Plugin::get().open(NetLog::logger()); }
};

// Promise(nccl): No address to listen on, an unknown provider or a wrong setting: init() fails, and
//   says what to change; NCCL then takes another network | each is tried
TEST_F(NetEnvironment, AnInterfaceThatIsNotThere) {
  setenv("NCCL_SOCKET_IFNAME", "nosuchinterface", 1);
  EXPECT_THAT(open(), fails_with(Code::kNotFound, {"nosuchinterface"}));
  EXPECT_THAT(Plugin::get().devices(), testing::IsEmpty());
  EXPECT_FALSE(Plugin::get().hub(0).ok());
}

TEST_F(NetEnvironment, AProviderOrASettingThatIsNotThere) {
  for (const auto& [name, value] : {std::pair("BATON_NCCL_PROVIDERS", "shm,tpc"),
                                    std::pair("BATON_NCCL_SET", "tcp.sockets=4,tcp.sokets=4")}) {
    setenv(name, value, 1);
    EXPECT_EQ(open().code(), absl::StatusCode::kInvalidArgument) << name;
    unsetenv(name);
  }
}

TEST_F(NetEnvironment, TheLoopbackInterface) {
  setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
  ASSERT_TRUE(open().ok()) << open();
  ASSERT_EQ(Plugin::get().devices().size(), 1u);
  EXPECT_EQ(Plugin::get().devices()[0].name, "lo");
}

// Promise(nccl): NICs are numbered by their PCI addresses, at every door | a made-up sysfs with
//   adapters whose names sort otherwise
TEST_F(NetEnvironment, AdaptersAreSortedByPciAddress) {
  namespace fs = std::filesystem;
  TemporaryFolder folder;
  const fs::path root(folder.path());
  const std::pair<const char*, const char*> adapters[] = {
      {"mlx5_2", "0000:05:00.0"}, {"mlx5_0", "0000:9a:00.0"}, {"mlx5_1", "0000:1b:00.0"}};
  for (const auto& [name, at] : adapters) {
    const fs::path device = root / "sys/devices/pci0000:00" / at;
    fs::create_directories(device);
    const std::string self = absl::StrCat("sys/class/infiniband/", name);
    folder.file(self + "/node_guid", "0c42:a103:0012:3456");
    folder.file(self + "/ports/1/state", "4: ACTIVE");
    folder.file(self + "/ports/1/rate", "400 Gb/sec (4X NDR)");
    folder.file(self + "/ports/2/state", "1: DOWN");
    fs::create_symlink(device, root / self / "device");
  }
  const auto names = [&](const char* wanted) {
    std::vector<std::string> out;
    for (const Device& device : find_devices(root, wanted, true, "lo")) out.push_back(device.name);
    return out;
  };
  EXPECT_THAT(names(""), testing::ElementsAre("mlx5_2:1", "mlx5_1:1", "mlx5_0:1"));
  EXPECT_THAT(names("=mlx5_0,mlx5_1:1"), testing::ElementsAre("mlx5_1:1", "mlx5_0:1"));
  EXPECT_THAT(names("^mlx5_1"), testing::ElementsAre("mlx5_2:1", "mlx5_0:1"));
  EXPECT_THAT(names("mlx5_2:2"), testing::ElementsAre("lo"));
  const Device first = find_devices(root, "", true, "lo").front();
  EXPECT_THAT(first.pci_path, testing::EndsWith("/sys/devices/pci0000:00/0000:05:00.0"));
  EXPECT_EQ(first.speed, 400'000);
  EXPECT_EQ(first.guid, 0x0c42a10300123456u);
  EXPECT_TRUE(first.rdma);
}

}  // namespace
}  // namespace baton::nccl
