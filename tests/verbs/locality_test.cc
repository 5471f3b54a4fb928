// Where devices and memory are, as sysfs tells it, and that the near rail gets more.
#include "verbs/device/locality.h"

#include <filesystem>

#include "tests/temporary_folder.h"
#include "tests/verbs/verbs_pair.h"

namespace baton {
namespace {

using testing::HasSubstr;
using verbs::Locality;

TEST(Locality, SysfsTellsNodesOfDevicesAndDistances) {
  TemporaryFolder tree;
  tree.file("/sys/class/infiniband/mlx5_0/device/numa_node", "0")
      .file("/sys/class/infiniband/mlx5_1/device/numa_node", "1")
      .file("/sys/class/infiniband/mlx5_2/device/numa_node", "-1")
      .file("/sys/class/infiniband/rxe0/parent", "eth3")
      .file("/sys/class/net/eth3/device/numa_node", "1")
      .file("/sys/devices/system/node/node0/distance", "10 21")
      .file("/sys/devices/system/node/node1/distance", "21 10");
  const auto locality = Locality::from_sysfs(tree.path());
  EXPECT_EQ(locality->device_node("mlx5_0"), 0);
  EXPECT_EQ(locality->device_node("mlx5_1"), 1);
  EXPECT_EQ(locality->device_node("mlx5_2"), Locality::kUnknown);
  EXPECT_EQ(locality->device_node("rxe0"), 1) << "of the interface under it";
  EXPECT_EQ(locality->device_node("none"), Locality::kUnknown);
  EXPECT_DOUBLE_EQ(locality->distance(0, 1), 2.1);
  EXPECT_DOUBLE_EQ(locality->distance(1, 1), 1);
  EXPECT_DOUBLE_EQ(locality->distance(Locality::kUnknown, 1), 1);
  EXPECT_DOUBLE_EQ(locality->distance(0, 7), 1) << "not in the table";
}

// How distances follow the bridges is for tests/bench/info_test.cc.
TEST(Locality, SysfsTellsHowFarAnAdapterIsFromAGpu) {
  TemporaryFolder tree;
  std::filesystem::create_directories(tree.path("/sys/bus/pci/devices"));
  const auto device = [&](const std::string& address) {
    const std::string at =
        "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/" + address;
    tree.file(at + "/numa_node", "0");
    std::filesystem::create_directory_symlink(tree.path(at),
                                              tree.path("/sys/bus/pci/devices/" + address));
    return tree.path(at);
  };
  const std::string nic = device("0000:03:00.0");
  device("0000:04:00.0");
  tree.file("/sys/class/infiniband/mlx5_0/fw_ver", "1")
      .file("/sys/class/infiniband/rxe0/parent", "eth3")
      .file("/sys/class/net/eth3/mtu", "1500");
  std::filesystem::create_directory_symlink(nic, tree.path("/sys/class/infiniband/mlx5_0/device"));
  std::filesystem::create_directory_symlink(nic, tree.path("/sys/class/net/eth3/device"));
  const auto locality = Locality::from_sysfs(tree.path());
  using base::PciDistance;
  for (const char* rdma : {"mlx5_0", "rxe0"}) {
    EXPECT_EQ(locality->pci_distance(rdma, "0000:04:00.0"), PciDistance::kPix) << rdma;
    EXPECT_EQ(locality->pci_distance(rdma, "0000:ff:00.0"), PciDistance::kUnknown) << rdma;
    EXPECT_EQ(locality->pci_distance(rdma, ""), PciDistance::kUnknown) << rdma;
  }
  EXPECT_EQ(locality->pci_distance("none", "0000:04:00.0"), PciDistance::kUnknown);
}

TEST(Locality, MemoryOfThisProcessIsOnSomeNodeOrUnknown) {
  TemporaryFolder tree;
  tree.file("/sys/devices/system/node/node1/distance", "10 10");
  const std::vector<char> memory(1 << 20, 1);
  // Node 0 on a machine of one, where the kernel may be asked at all.
  EXPECT_GE(Locality::from_sysfs(tree.path())->memory_node(memory.data(), memory.size()), -1);
  EXPECT_EQ(Locality::from_sysfs(tree.path())->memory_node(memory.data(), 0), Locality::kUnknown);
  EXPECT_EQ(Locality::from_sysfs("/nowhere")->memory_node(memory.data(), memory.size()),
            Locality::kUnknown)
      << "one node: nothing to choose";
  EXPECT_NE(Locality::of_this_machine(), nullptr);
}

// fake0 on node 0, fake1 on node 1; all memory on `node`.
class TwoNodes final : public Locality {
 public:
  explicit TwoNodes(int node) : node_(node) {}
  int device_node(const std::string& device) const override { return device == "fake1"; }
  int memory_node(const void*, size_t) const override { return node_; }
  double distance(int from, int to) const override { return from < 0 || from == to ? 1 : 3; }

 private:
  const int node_;
};

TEST(Locality, TheNearRailGetsMoreAndSmallTransfersToo) {
  for (int near : {0, 1}) {
    SCOPED_TRACE(near);
    VerbsPair pair({.devices = 2}, {{"verbs.slice_kib", "64"}}, std::make_shared<TwoNodes>(near));
    pair.connect();
    EXPECT_THAT(pair.a.worker->explain(pair.a.peer), HasSubstr("NUMA node"));
    const auto moved = [&](int device) { return pair.fake->moved(static_cast<size_t>(device)); };
    uint64_t before[] = {moved(near), moved(1 - near)};
    ASSERT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
    const auto near_bytes = static_cast<double>(moved(near) - before[0]);
    const auto far_bytes = static_cast<double>(moved(1 - near) - before[1]);
    EXPECT_GT(far_bytes, 0) << "it still helps";
    EXPECT_NEAR(near_bytes / (near_bytes + far_bytes), 0.75, 0.1);
    before[0] = moved(near);
    before[1] = moved(1 - near);
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(pair.run(pair.request(Op::kWrite, 4096)).ok());
    EXPECT_EQ(moved(near) - before[0], 50u * 4096);
    EXPECT_EQ(moved(1 - near), before[1]);
  }
}

}  // namespace
}  // namespace baton
