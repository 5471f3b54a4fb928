// What the doctor finds on other machines.
#include "bench/doctor/doctor.h"
#include "bench/doctor/info.h"
#include "info_tree.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using testing::HasSubstr;
using Grade = Check::Grade;

constexpr const char* kNearNic = "pci0000:00/0000:00:01.0/0000:01:00.0";

Json providers(bool verbs) {
  return Json::array(
      {{{"name", "verbs"}, {"usable", verbs}, {"rank", 200}, {"detail", "what it is"}},
       {{"name", "tcp"}, {"usable", true}, {"rank", 10}, {"detail", "sockets"}}});
}

// A machine on which everything is as it should be.
struct GoodMachine : FakeTree {
  GoodMachine() {
    pci(kNearNic, "0x15b3", "0x020700", 0)
        .rdma("mlx5_0", kNearNic, "eth2")
        .netdev("eth2", "up", 9000);
    file("/dev/infiniband/uverbs0", "");
    limits("unlimited", "65536");
    file("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "512");
    file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512");
    file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never");
    file("/proc/sys/kernel/osrelease", "6.1.0");
    file("/proc/sys/kernel/yama/ptrace_scope", "0");
  }
};

std::vector<Check> checks_of(const FakeTree& tree, const std::string& provider, bool verbs = true) {
  return examine(collect_info(tree.root(), providers(verbs)), provider);
}

// The check of that name that is worst; a check without a name where there is none.
Check worst(const std::vector<Check>& checks, const std::string& name) {
  Check found;
  for (const Check& check : checks) {
    if (check.name == name && (found.name.empty() || check.grade > found.grade)) found = check;
  }
  return found;
}

TEST(Doctor, AGoodMachineIsAllOk) {
  GoodMachine tree;
  const std::vector<Check> checks = checks_of(tree, "verbs");
  for (const Check& check : checks) {
    EXPECT_EQ(check.grade, Grade::kOk) << check.name << ": " << check.finding;
  }
  EXPECT_FALSE(failed(checks));
  EXPECT_GE(checks.size(), 6u);
}

TEST(Doctor, NoDeviceFailsOnlyWhereVerbsIsAskedFor) {
  FakeTree tree;
  tree.netdev("lo", "unknown", 65536).netdev("ens3", "up", 1500);
  tree.file("/proc/sys/kernel/osrelease", "6.1.0");
  EXPECT_FALSE(failed(checks_of(tree, "", false)));
  EXPECT_FALSE(failed(checks_of(tree, "tcp", false)));
  const std::vector<Check> checks = checks_of(tree, "verbs", false);
  EXPECT_TRUE(failed(checks));
  EXPECT_EQ(worst(checks, "provider verbs").grade, Grade::kFail);
  const Check none = worst(checks, "rdma devices");
  EXPECT_EQ(none.grade, Grade::kFail);
  EXPECT_THAT(none.remedy, HasSubstr("type rxe netdev ens3"));
  EXPECT_THAT(none.remedy, HasSubstr("./run softroce"));
}

TEST(Doctor, SoftRoceIsOfferedAsFarAsTheKernelGoes) {
  FakeTree tree;
  tree.file("/proc/sys/kernel/osrelease", "6.1.0");
  tree.file("/lib/modules/6.1.0/modules.dep", "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz:");
  EXPECT_THAT(worst(checks_of(tree, "verbs", false), "rdma devices").remedy,
              HasSubstr("`modprobe rdma_rxe && rdma link add"));
  tree.file("/sys/module/rdma_rxe/refcnt", "0");
  EXPECT_THAT(worst(checks_of(tree, "verbs", false), "rdma devices").remedy,
              HasSubstr("`rdma link add"));
}

// A name of a package is given where there is such a package: not of a kernel that somebody built.
TEST(Doctor, OnlyADistributionsKernelNamesAPackage) {
  const struct {
    const char* release;
    bool named;
  } kernels[] = {{"6.8.0-45-generic", true}, {"6.8.0-1021-aws", true},
                 {"6.1.0-18-amd64", false},  {"6.8.0-45-generic-mine", false},
                 {"6.1.7", false},           {"5.15.0-microsoft-standard-WSL2", false},
                 {"6.6.1-g1234abc+", false}};
  for (const auto& [release, named] : kernels) {
    FakeTree tree;
    tree.file("/proc/sys/kernel/osrelease", release);
    const std::string text = doctor_text(checks_of(tree, "verbs", false));
    EXPECT_EQ(text.find("linux-modules-extra-" + std::string(release)) != text.npos, named) << text;
    EXPECT_EQ(text.find("linux-modules-extra") != text.npos, named) << text;
  }
}

TEST(Doctor, EndsWithASummary) {
  GoodMachine tree;
  EXPECT_THAT(doctor_text(checks_of(tree, "verbs")),
              testing::ContainsRegex(
                  "\nsummary: [0-9]+ ok, 0 warn, 0 fail: all checks that matter here passed\n$"));
  tree.limits("8388608", "65536");
  const std::vector<Check> bad = checks_of(tree, "verbs", false);
  EXPECT_THAT(doctor_text(bad), testing::ContainsRegex("\nsummary: [0-9]+ ok, [0-9]+ warn, "
                                                       "[1-9][0-9]* fail: fix what failed "
                                                       "first\n$"));
  // As JSON it says the same.
  const Json json = doctor_json(bad);
  EXPECT_EQ(json["ok"], false);
  size_t counted = 0;
  for (const char* grade : {"ok", "warn", "fail"}) counted += json["summary"][grade].get<size_t>();
  EXPECT_EQ(counted, bad.size());
  ASSERT_EQ(json["checks"].size(), bad.size());
  for (const Json& check : json["checks"]) {
    if (check["name"] != "memlock") continue;
    EXPECT_EQ(check["grade"], "fail");
    EXPECT_EQ(check["provider"], "verbs");
    EXPECT_THAT(check["remedy"].get<std::string>(), HasSubstr("ulimit"));
  }
}

TEST(Doctor, APortThatIsDown) {
  GoodMachine tree;
  tree.file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN");
  const std::vector<Check> checks = checks_of(tree, "verbs");
  EXPECT_TRUE(failed(checks));
  EXPECT_THAT(worst(checks, "mlx5_0 port 1").remedy, HasSubstr("ip link set dev eth2 up"));
  EXPECT_EQ(worst(checks, "rdma ports").grade, Grade::kFail);
}

TEST(Doctor, SmallMtuAndNoIpv4Address) {
  GoodMachine tree;
  tree.netdev("eth2", "up", 1500);
  tree.file("/sys/class/infiniband/mlx5_0/ports/1/gids/1",
            "fe80:0000:0000:0000:0a00:27ff:fe00:0001");
  const std::vector<Check> checks = checks_of(tree, "verbs");
  EXPECT_FALSE(failed(checks));
  const std::string text = doctor_text(checks);
  EXPECT_THAT(text, HasSubstr("ip link set dev eth2 mtu 4200"));
  EXPECT_THAT(text, HasSubstr("ip addr add"));
}

TEST(Doctor, LockedMemory) {
  GoodMachine tree;
  tree.limits("8388608", "65536");
  Check memlock = worst(checks_of(tree, "verbs"), "memlock");
  EXPECT_EQ(memlock.grade, Grade::kFail);
  EXPECT_THAT(memlock.finding, HasSubstr("8 MiB"));
  EXPECT_THAT(memlock.remedy, HasSubstr("ulimit -l unlimited"));
  EXPECT_EQ(worst(checks_of(tree, ""), "memlock").grade, Grade::kWarn);
  EXPECT_EQ(worst(checks_of(tree, "tcp"), "memlock").name, "");  // no matter of tcp
  tree.limits("268435456", "65536");
  EXPECT_EQ(worst(checks_of(tree, "verbs"), "memlock").grade, Grade::kWarn);
  tree.file("/proc/self/status", "CapEff:\t0000000000004000");
  EXPECT_EQ(worst(checks_of(tree, "verbs"), "memlock").grade, Grade::kOk);
}

TEST(Doctor, EveryOtherComplaintHasItsRemedy) {
  GoodMachine tree;
  std::filesystem::remove_all(tree.path() + "/dev/infiniband");
  tree.file("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0");
  tree.file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]");
  tree.file("/proc/sys/kernel/yama/ptrace_scope", "1");
  tree.file("/proc/sys/net/core/rmem_max", "212992");
  tree.file("/proc/sys/net/ipv4/tcp_congestion_control", "bbr");
  tree.limits("unlimited", "256");
  tree.file("/proc/self/cgroup", "0::/x").file("/sys/fs/cgroup/x/memory.max", "1000000");
  tree.pci("pci0000:00/0000:00:02.0/0000:02:00.0", "0x10de", "0x030200", 0);
  const std::string text = doctor_text(checks_of(tree, ""));
  for (const char* remedy : {"modprobe ib_uverbs", "vm.nr_hugepages", "shmem_enabled",
                             "yama.ptrace_scope=0", "net.core.rmem_max=16777216",
                             "modprobe tcp_cubic", "ulimit -n", "memory.max", "modprobe nvidia"}) {
    EXPECT_THAT(text, HasSubstr(remedy));
  }
  tree.file("/proc/driver/nvidia/version", "NVRM version: NVIDIA Kernel Module  535.1  x");
  EXPECT_THAT(doctor_text(checks_of(tree, "")), HasSubstr("modprobe nvidia-peermem"));
  tree.file("/sys/module/nvidia_peermem/refcnt", "0");
  EXPECT_THAT(doctor_text(checks_of(tree, "")), HasSubstr("by its address, with nvidia-peermem"));
}

TEST(Doctor, AnUnknownProviderFails) {
  GoodMachine tree;
  const std::vector<Check> checks = checks_of(tree, "pigeon");
  EXPECT_TRUE(failed(checks));
  EXPECT_EQ(worst(checks, "provider pigeon").grade, Grade::kFail);
  EXPECT_THAT(doctor_text(checks_of(tree, "tpc")), HasSubstr("did you mean tcp?"));
}

// A GPU and the adapter nearest to it: at one host bridge, and at two sockets.
TEST(Doctor, AGpuWithoutAnAdapterNearIsWarnedOf) {
  GoodMachine tree;
  tree.pci("pci0000:00/0000:00:02.0/0000:05:00.0", "0x10de", "0x030200", 0);
  tree.pci("pci0000:c0/0000:c0:01.0/0000:c1:00.0", "0x10de", "0x030200", 1);
  const std::vector<Check> checks = checks_of(tree, "verbs");
  const Check near = worst(checks, "gpu 0000:05:00.0");
  EXPECT_EQ(near.grade, Grade::kOk);
  EXPECT_THAT(near.finding, HasSubstr("the nearest RDMA device is mlx5_0 (PHB)"));
  const Check far = worst(checks, "gpu 0000:c1:00.0");
  EXPECT_EQ(far.grade, Grade::kWarn);
  EXPECT_THAT(far.finding, HasSubstr("mlx5_0 (SYS), which is not in its PCIe tree"));
  EXPECT_THAT(far.remedy, HasSubstr("under the same host bridge"));
}

TEST(Doctor, NothingUsableFails) {
  FakeTree tree;
  const Json info = collect_info(tree.root(), Json::array());
  EXPECT_TRUE(failed(examine(info, "")));
}

}  // namespace
}  // namespace baton::bench
