// What is read from the files of other machines.
#include "bench/doctor/info.h"

#include "info_tree.h"
#include "tests/test.h"
#include "transport/provider.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;

constexpr const char* kNic = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0";
constexpr const char* kGpu = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0";

TEST(SystemRoot, ReadsBelowItsFolder) {
  FakeTree tree;
  tree.file("/a/10", "12 apples").file("/a/9", "pears").file("/a/2", "");
  tree.link("/b", "/a");
  const SystemRoot root = tree.root();
  EXPECT_EQ(root.text("/a/10"), "12 apples");
  EXPECT_EQ(root.number("/a/10"), 12u);
  EXPECT_FALSE(root.number("/a/9").has_value());
  EXPECT_EQ(root.text("/nowhere"), "");
  EXPECT_EQ(root.list("/a"), (std::vector<std::string>{"2", "9", "10"}));
  EXPECT_TRUE(root.list("/nowhere").empty());
  EXPECT_EQ(root.real("/b"), "/a");
  EXPECT_EQ(root.real("/nowhere"), "");
  EXPECT_TRUE(root.exists("/b/9"));
  EXPECT_TRUE(root.writable("/b/9"));
  EXPECT_FALSE(root.writable("/nowhere"));
}

TEST(Info, AnEmptyMachineIsNoError) {
  FakeTree tree;
  const Json info = collect_info(tree.root(), Json::array());
  EXPECT_TRUE(info["rdma_devices"].empty());
  EXPECT_TRUE(info["gpus"].empty());
  EXPECT_TRUE(info["limits"]["memlock"]["soft"].is_null());
  EXPECT_TRUE(info["nvidia"]["driver"].is_null());
  EXPECT_THAT(info_text(info), HasSubstr("RDMA devices\n  none"));
}

TEST(Info, RdmaDevicesPortsAndGids) {
  FakeTree tree;
  tree.pci(kNic, "0x15b3", "0x020700", 1).rdma("mlx5_0", kNic, "eth2").netdev("eth2", "up", 4200);
  const Json devices = rdma_devices(tree.root());
  ASSERT_EQ(devices.size(), 1u);
  const Json& device = devices[0];
  EXPECT_EQ(device["name"], "mlx5_0");
  EXPECT_EQ(device["pci"], "0000:03:00.0");
  EXPECT_EQ(device["numa_node"], 1);
  EXPECT_EQ(device["firmware"], "28.39.1002");
  ASSERT_EQ(device["ports"].size(), 1u);
  const Json& port = device["ports"][0];
  EXPECT_EQ(port["state"], "ACTIVE");
  EXPECT_EQ(port["netdev"], "eth2");
  EXPECT_EQ(port["netdev_mtu"], 4200);
  EXPECT_EQ(port["mtu"], 4096);
  ASSERT_EQ(port["gids"].size(), 2u);  // the third is unused
  EXPECT_EQ(port["gids"][1]["index"], 1);
  EXPECT_EQ(port["gids"][1]["type"], "RoCE v2");
  EXPECT_TRUE(is_ipv4_gid(port["gids"][1]["gid"].get<std::string>()));
  EXPECT_FALSE(is_ipv4_gid(port["gids"][0]["gid"].get<std::string>()));
  EXPECT_EQ(port["counters"], (Json{{"out_of_sequence", 7}}));
  const std::string text = info_text(collect_info(tree.root(), Json::array()));
  EXPECT_THAT(text, HasSubstr("mlx5_0  PCI 0000:03:00.0, NUMA node 1"));
  EXPECT_THAT(text, HasSubstr("MTU 4096 (of 4200)"));
  EXPECT_THAT(text, HasSubstr("out_of_sequence = 7"));
}

TEST(Info, RoceMtuFitsTheNetworkDevice) {
  for (const auto& [netdev, roce] :
       {std::pair(1500, 1024), {9000, 4096}, {4200, 4096}, {4096, 2048}, {300, 256}}) {
    FakeTree tree;
    tree.rdma("rxe0", "virtual", "v0").netdev("v0", "up", netdev);
    const Json devices = rdma_devices(tree.root());
    EXPECT_EQ(devices[0]["ports"][0]["mtu"], roce) << netdev;
    EXPECT_TRUE(devices[0]["pci"].is_null());
  }
}

TEST(Info, DistancesFollowTheBridges) {
  FakeTree tree;
  tree.pci(kNic, "0x15b3", "0x020700", 0).pci(kGpu, "0x10de", "0x030200", 0);
  tree.pci("pci0000:00/0000:00:02.0/0000:05:00.0", "0x10de", "0x030000", 0);
  tree.pci("pci0000:80/0000:80:01.0/0000:81:00.0", "0x10de", "0x030200", 0);
  tree.pci("pci0000:c0/0000:c0:01.0/0000:c1:00.0", "0x10de", "0x030200", 1);
  tree.pci(
      "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:06:00.0/0000:07:00.0/0000:08:00.0",
      "0x10de", "0x030200", 0);
  tree.pci("pci0000:00/0000:00:03.0/0000:09:00.0", "0x10de", "0x040300", 0);  // its sound
  const SystemRoot root = tree.root();
  EXPECT_EQ(gpus(root).size(), 5u);
  tree.rdma("mlx5_0", kNic, "eth2");
  const Json pairs = distances(root, rdma_devices(root), gpus(root));
  std::map<std::string, std::string> found;
  for (const Json& pair : pairs) found[pair["gpu"]] = pair["distance"];
  EXPECT_THAT(found, UnorderedElementsAre(Pair("0000:04:00.0", "PIX"), Pair("0000:08:00.0", "PXB"),
                                          Pair("0000:05:00.0", "PHB"), Pair("0000:81:00.0", "NODE"),
                                          Pair("0000:c1:00.0", "SYS")));
  EXPECT_EQ(pairs[0]["rdma"], "mlx5_0");
}

// What bounds the rate of a GPU, as the kernel has it.
TEST(Info, TheLinkOfAGpuAndItsWindow) {
  FakeTree tree;
  const std::string chain = "pci0000:00/0000:00:02.0/0000:05:00.0";
  const std::string at = "/sys/devices/" + chain;
  tree.pci(chain, "0x10de", "0x030200", 0)
      .file("/proc/cpuinfo", "flags\t\t: fpu vme hypervisor lahf_lm\n")
      .file(at + "/current_link_speed", "2.5 GT/s PCIe\n")
      .file(at + "/current_link_width", "16\n")
      .file(at + "/max_link_speed", "32.0 GT/s PCIe\n")
      .file(at + "/max_link_width", "16\n")
      .file(at + "/resource",
            "0x00000000fa000000 0x00000000faffffff 0x0000000000040200\n"
            "0x0000038000000000 0x0000039fffffffff 0x000000000014220c\n"
            "0x0000000000000000 0x0000000000000000 0x0000000000000000\n")
      .file("/sys/kernel/iommu_groups/7/type", "DMA-FQ\n")
      .link(at + "/iommu_group", "/sys/kernel/iommu_groups/7");
  const Json gpu = gpus(tree.root())[0];
  EXPECT_EQ(gpu["link"], "2.5 GT/s PCIe x16");
  EXPECT_EQ(gpu["best_link"], "32.0 GT/s PCIe x16");
  EXPECT_EQ(gpu["bar1_bytes"], uint64_t{128} << 30);
  EXPECT_EQ(gpu["iommu"], "DMA-FQ");
  EXPECT_THAT(info_text(collect_info(tree.root(), Json::array())),
              HasSubstr("link 2.5 GT/s PCIe x16 now, 32.0 GT/s PCIe x16 at best, BAR1 128 GiB, "
                        "IOMMU DMA-FQ, in a virtual machine"));
}

TEST(Info, AGpuWithoutFactsIsShownAsUnknown) {
  FakeTree tree;
  tree.pci("pci0000:00/0000:00:02.0/0000:05:00.0", "0x10de", "0x030200", 0)
      .file("/sys/devices/pci0000:00/0000:00:02.0/0000:05:00.0/resource", "nothing\nof use");
  const Json gpu = gpus(tree.root())[0];
  for (const char* what : {"link", "best_link", "bar1_bytes", "iommu"}) {
    EXPECT_TRUE(gpu[what].is_null()) << what;
  }
  EXPECT_THAT(info_text(collect_info(tree.root(), Json::array())),
              HasSubstr("link - now, - at best, BAR1 -, IOMMU -\n"));
}

TEST(Info, ModulesAreLoadedAvailableOrMissing) {
  FakeTree tree;
  tree.file("/proc/sys/kernel/osrelease", "6.1.0-56-amd64")
      .file("/sys/module/ib_uverbs/refcnt", "1")
      .file("/lib/modules/6.1.0-56-amd64/modules.dep",
            "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: kernel/x.ko\n"
            "updates/nvidia-peermem.ko:")
      .file("/proc/sys/kernel/yama/ptrace_scope", "1");
  const Json kernel = kernel_info(tree.root());
  EXPECT_EQ(kernel["modules"]["ib_uverbs"], "loaded");
  EXPECT_EQ(kernel["modules"]["rdma_rxe"], "available");
  EXPECT_EQ(kernel["modules"]["nvidia_peermem"], "available");
  EXPECT_EQ(kernel["modules"]["siw"], "missing");
  EXPECT_EQ(kernel["ptrace_scope"], 1);
  EXPECT_EQ(kernel["dma_buf_registration"], true);
  tree.file("/proc/sys/kernel/osrelease", "5.10.0");
  EXPECT_EQ(kernel_info(tree.root())["dma_buf_registration"], false);
}

TEST(Info, LimitsOfTheProcessAndItsCgroups) {
  FakeTree tree;
  tree.limits("8388608", "1024").file("/proc/self/status", "Name: x\nCapEff:\t0000000000004000");
  tree.file("/proc/self/cgroup", "4:memory:/pod/one\n0::/slice/unit");
  tree.file("/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "1073741824");
  tree.file("/sys/fs/cgroup/memory/pod/one/memory.limit_in_bytes", "9223372036854771712");
  tree.file("/sys/fs/cgroup/slice/unit/memory.max", "2147483648");
  tree.file("/sys/fs/cgroup/slice/unit/rdma.max", "mlx5_0 hca_handle=2 hca_object=max");
  tree.file("/dev/infiniband/uverbs0", "");
  const Json limits = limits_info(tree.root());
  EXPECT_EQ(limits["memlock"]["soft"], 8388608);
  EXPECT_TRUE(limits["memlock"]["hard"].is_null());
  EXPECT_EQ(limits["open_files"]["soft"], 1024);
  EXPECT_EQ(limits["ipc_lock"], true);
  EXPECT_EQ(limits["cgroup_memory"], 1073741824);
  EXPECT_EQ(limits["cgroup_rdma"], Json::array({"mlx5_0 hca_handle=2"}));
  ASSERT_EQ(limits["uverbs"].size(), 1u);
  EXPECT_EQ(limits["uverbs"][0]["usable"], true);
}

TEST(Info, MemoryNetworkNumaAndNvidia) {
  FakeTree tree;
  tree.file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512")
      .file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "100")
      .file("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
      .file("/proc/sys/net/ipv4/tcp_congestion_control", "cubic")
      .file("/proc/sys/net/core/rmem_max", "212992")
      .netdev("lo", "unknown", 65536)
      .file("/sys/devices/system/node/node1/cpulist", "8-15")
      .file("/sys/devices/system/node/node1/distance", "21 10")
      .file("/proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build");
  const Json memory = memory_info(tree.root());
  EXPECT_EQ(memory["huge_pages"][0], (Json{{"kib", 2048}, {"total", 512}, {"free", 100}}));
  EXPECT_EQ(memory["transparent"], "madvise");
  EXPECT_TRUE(memory["transparent_shmem"].is_null());
  const Json network = network_info(tree.root());
  EXPECT_EQ(network["congestion"], "cubic");
  EXPECT_EQ(network["rmem_max"], 212992);
  EXPECT_EQ(network["netdevs"][0]["name"], "lo");
  EXPECT_EQ(numa_info(tree.root())[0]["cpus"], "8-15");
  const Json nvidia = nvidia_info(tree.root());
  EXPECT_EQ(nvidia["driver"], "580.65.06");
  EXPECT_EQ(nvidia["open_module"], true);
  EXPECT_EQ(nvidia["peermem"], false);
}

TEST(Info, ProbesTheProvidersOfThisProgram) {
  const Json providers = probe_providers();
  bool tcp = false, verbs = false;
  for (const Json& provider : providers) {
    if (provider["name"] == "tcp") tcp = provider["usable"].get<bool>();
    verbs = verbs || provider["name"] == "verbs";
    EXPECT_NE(provider["detail"], "") << provider;
  }
  EXPECT_TRUE(tcp);
  EXPECT_TRUE(verbs);
}

TEST(Info, AProviderThatEndsItsProcessIsReportedAsSuch) {
  const ProviderRegistration deadly(
      "deadly", [](const ProviderContext&) -> std::unique_ptr<Provider> { std::_Exit(3); }, {},
      "it ends its process");
  for (const Json& provider : probe_providers()) {
    if (provider["name"] != "deadly") continue;
    EXPECT_FALSE(provider["usable"].get<bool>());
    EXPECT_NE(provider["detail"].get<std::string>().find("ended the process"), std::string::npos);
    return;
  }
  FAIL() << "it is not listed";
}

}  // namespace
}  // namespace baton::bench
