// The checks of `baton doctor` on limits, memory, kernel features and GPUs.
#include <algorithm>
#include <array>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/doctor/doctor.h"
#include "bench/doctor/info.h"

namespace baton::bench {
namespace {

using Grade = Check::Grade;
constexpr size_t kMiB = 1 << 20;
constexpr size_t kSmallMemlock = 64 * kMiB;  // the smallest slab of a pool does not fit
constexpr size_t kGoodMemlock = 1024 * kMiB;
constexpr size_t kGoodSocketBuffer = 4 * kMiB;
constexpr size_t kFewFiles = 1024;

}  // namespace

void check_limits(const Json& info, std::vector<Check>& out) {
  const Json& limits = info["limits"];
  const Json& memlock = limits["memlock"]["soft"];
  const bool root = limits["ipc_lock"].get<bool>();
  if (memlock.is_null() || root || memlock >= kGoodMemlock) {
    out.push_back({Grade::kOk, "memlock", "verbs",
                   root                ? "CAP_IPC_LOCK: memory may be locked without limit"
                   : memlock.is_null() ? std::string("unlimited")
                                       : absl::StrCat("up to ", human_bytes(memlock.get<size_t>())),
                   ""});
  } else {
    out.push_back({memlock < kSmallMemlock ? Grade::kFail : Grade::kWarn, "memlock", "verbs",
                   absl::StrFormat("only %s may be locked, so larger registrations fail",
                                   human_bytes(memlock.get<size_t>())),
                   "`ulimit -l unlimited`; for good: \"* - memlock unlimited\" in "
                   "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, --ulimit "
                   "memlock=-1 for a container"});
  }
  if (const Json& cgroup = limits["cgroup_memory"]; !cgroup.is_null() && cgroup < kGoodMemlock) {
    out.push_back({Grade::kWarn, "cgroup memory", "",
                   absl::StrFormat("this cgroup has %s", human_bytes(cgroup.get<size_t>())),
                   "raise memory.max of the cgroup (--memory for a container)"});
  }
  const Json& files = limits["open_files"]["soft"];
  if (!files.is_null() && files < kFewFiles) {
    out.push_back({Grade::kWarn, "open files", "",
                   absl::StrFormat("only %s files may be open", files.dump()),
                   "`ulimit -n 65536`"});
  }
}

void check_memory(const Json& info, std::vector<Check>& out) {
  const Json& sizes = info["memory"]["huge_pages"];
  const auto has = [&](const char* key) {
    return std::any_of(sizes.begin(), sizes.end(), [&](const Json& size) {
      return size[key].is_number() && size[key].get<uint64_t>() > 0;
    });
  };
  if (has("free")) {
    out.push_back({Grade::kOk, "huge pages", "", "some are free", ""});
  } else {
    out.push_back({Grade::kWarn, "huge pages", "",
                   has("total") ? "all are in use: pools fall back to ordinary pages"
                                : "none are reserved: pools use ordinary pages",
                   "`sysctl vm.nr_hugepages=512` (1 GiB), early after boot"});
  }
  const Json& shmem = info["memory"]["transparent_shmem"];
  if (shmem == "never" || shmem == "deny") {
    out.push_back({Grade::kWarn, "transparent huge pages", "",
                   absl::StrCat("shared memory gets none (", shmem.get<std::string>(), ")"),
                   "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`"});
  }
}

void check_kernel(const Json& info, std::vector<Check>& out) {
  const Json& kernel = info["kernel"];
  const Json& scope = kernel["ptrace_scope"];
  if (scope.is_null() || scope == 0) {
    out.push_back({Grade::kOk, "ptrace scope", "shm",
                   "processes of one user may copy from each other (CMA)", ""});
  } else {
    out.push_back({Grade::kWarn, "ptrace scope", "shm",
                   absl::StrFormat("kernel.yama.ptrace_scope=%s: only pool memory can be shared",
                                   scope.dump()),
                   "allocate from a MemoryPool, or `sysctl kernel.yama.ptrace_scope=0`"});
  }
  const Json& network = info["network"];
  for (const char* key : {"rmem_max", "wmem_max"}) {
    const Json& most = network[key];
    if (most.is_null() || most >= kGoodSocketBuffer) continue;
    out.push_back({Grade::kWarn, absl::StrCat("net.core.", key), "tcp",
                   absl::StrFormat("socket buffers end at %s", human_bytes(most.get<size_t>())),
                   absl::StrFormat("`sysctl net.core.%s=%d`", key, 4 * kGoodSocketBuffer)});
  }
  const std::string available =
      network["available"].is_string() ? network["available"].get<std::string>() : "";
  if (network["congestion"] == "bbr" && !absl::StrContains(available, "cubic")) {
    out.push_back({Grade::kWarn, "congestion control", "tcp",
                   "bbr paces, which halves the speed of short links, and cubic is not available",
                   "`modprobe tcp_cubic`"});
  }
}

// Reports which path each CUDA device's memory takes over adapters, from the driver's facts.
void check_cuda(const Json& cuda, std::vector<Check>& out) {
  if (cuda.is_null()) return;
  for (const Json& device : cuda["devices"]) {
    const std::string why = device["why_staged"].get<std::string>();
    const std::string name = absl::StrCat("cuda device ", device["ordinal"].get<int>());
    if (why.empty()) {
      out.push_back({Grade::kOk, name, "",
                     absl::StrCat(device["name"].get<std::string>(), ": adapters reach it by ",
                                  device["path"].get<std::string>(), "; their writes are ",
                                  device["writes_of_adapters"].get<std::string>()),
                     ""});
    } else {
      out.push_back(
          {Grade::kWarn, name, "",
           absl::StrCat(device["name"].get<std::string>(), ": staged through the host: ", why),
           ""});
    }
  }
}

// Checks that each GPU has an adapter nearby: bytes between two sockets cross the link between
// them.
void check_distances(const Json& info, std::vector<Check>& out) {
  constexpr std::array<const char*, 5> kNearFirst = {"PIX", "PXB", "PHB", "NODE", "SYS"};
  for (const Json& gpu : info["gpus"]) {
    size_t best = kNearFirst.size();
    std::string nearest;
    for (const Json& pair : info["distances"]) {
      if (pair["gpu"] != gpu["pci"]) continue;
      const auto rank = static_cast<size_t>(
          std::find(kNearFirst.begin(), kNearFirst.end(), pair["distance"].get<std::string>()) -
          kNearFirst.begin());
      if (rank >= best) continue;
      best = rank;
      nearest = pair["rdma"].get<std::string>();
    }
    if (nearest.empty()) continue;
    const bool far = best >= 3;
    out.push_back({far ? Grade::kWarn : Grade::kOk,
                   absl::StrCat("gpu ", gpu["pci"].get<std::string>()), "",
                   absl::StrCat("the nearest RDMA device is ", nearest, " (", kNearFirst[best], ")",
                                far ? ", which is not in its PCIe tree" : ""),
                   far ? "use the GPU with an adapter under the same host bridge, if there is one; "
                         "a path through the processors may be slower than staging"
                       : ""});
  }
}

void check_gpus(const Json& info, std::vector<Check>& out) {
  check_cuda(info["cuda"], out);
  check_distances(info, out);
  if (info["gpus"].empty()) return;
  const Json& nvidia = info["nvidia"];
  if (nvidia["driver"].is_null()) {
    out.push_back({Grade::kWarn, "nvidia driver", "", "a GPU is present, but no driver is loaded",
                   "install the driver (nvidia-open) and `modprobe nvidia`"});
    return;
  }
  out.push_back({Grade::kOk, "nvidia driver", "", nvidia["driver"].get<std::string>(), ""});
  if (info["rdma_devices"].empty()) return;
  const bool dma_buf =
      nvidia["open_module"].get<bool>() && info["kernel"]["dma_buf_registration"].get<bool>();
  if (dma_buf || nvidia["peermem"].get<bool>()) {
    out.push_back({Grade::kOk, "gpu memory over rdma", "verbs",
                   dma_buf ? "dma-buf" : "by its address, with nvidia-peermem", ""});
  } else {
    out.push_back({Grade::kWarn, "gpu memory over rdma", "verbs",
                   "no dma-buf (open kernel module, Linux 5.12) and no nvidia-peermem: staged "
                   "through the host",
                   "install nvidia-open and Linux 5.12 or newer, or `modprobe nvidia-peermem`"});
  }
}

namespace {

using Grade = Check::Grade;
constexpr const char* kVerbs = "verbs";

// The network device that soft-RoCE would be put on.
std::string some_netdev(const Json& info) {
  std::string best = "ETH";
  for (const Json& netdev : info["network"]["netdevs"]) {
    const std::string name = netdev["name"].get<std::string>();
    if (name != "lo" && netdev["state"] == "up") return name;
  }
  return best;
}

// Tells how to get an RDMA device on a machine without one.
std::string soft_roce(const Json& info) {
  const std::string add =
      absl::StrFormat("rdma link add rxe0 type rxe netdev %s", some_netdev(info));
  const std::string state = info["kernel"]["modules"]["rdma_rxe"].get<std::string>();
  if (state == "loaded") return absl::StrFormat("`%s` adds a software device (soft-RoCE)", add);
  if (state == "available") {
    return absl::StrFormat("`modprobe rdma_rxe && %s` adds a software device (soft-RoCE)", add);
  }
  // Only a distribution's own kernel has packages that bear its name.
  static const std::regex ubuntu(
      R"(\d+\.\d+\.\d+-\d+-(generic|lowlatency|aws|azure|gcp|gke|ibm|kvm|nvidia|oracle)(-64k)?)");
  const std::string release = info["kernel"]["release"].get<std::string>();
  const std::string kernel =
      std::regex_match(release, ubuntu)
          ? absl::StrCat("`apt-get install linux-modules-extra-", release, "`")
          : "run a kernel that has rdma_rxe (Debian: linux-image-amd64)";
  return absl::StrFormat(
      "no NIC: %s, then `modprobe rdma_rxe && %s`; or `./run softroce`, which brings its own "
      "kernel",
      kernel, add);
}

void check_access(const Json& info, std::vector<Check>& out) {
  const Json& nodes = info["limits"]["uverbs"];
  const bool any =
      std::any_of(nodes.begin(), nodes.end(), [](const Json& n) { return n["usable"] == true; });
  if (any) {
    out.push_back({Grade::kOk, "uverbs", kVerbs, "/dev/infiniband can be opened", ""});
  } else if (nodes.empty()) {
    out.push_back({Grade::kFail, "uverbs", kVerbs, "there is no /dev/infiniband/uverbs*",
                   "`modprobe ib_uverbs`; in a container: --device=/dev/infiniband"});
  } else {
    out.push_back({Grade::kFail, "uverbs", kVerbs, "/dev/infiniband/uverbs* may not be opened",
                   "`chmod 0666 /dev/infiniband/uverbs*`, or join the group that owns them"});
  }
}

void check_port(const std::string& device, const Json& port, std::vector<Check>& out) {
  const std::string name = absl::StrCat(device, " port ", port["number"].dump());
  const std::string netdev = port.value("netdev", std::string());
  const bool ethernet = port["link_layer"] == "Ethernet";
  if (port["state"] != "ACTIVE") {
    out.push_back({Grade::kWarn, name, kVerbs,
                   absl::StrCat("is ", port["state"].get<std::string>()),
                   ethernet ? absl::StrFormat("`ip link set dev %s up`, and check the cable",
                                              netdev.empty() ? "NETDEV" : netdev)
                            : "check the cable, and that a subnet manager (opensm) runs"});
    return;
  }
  out.push_back({Grade::kOk, name, kVerbs, "is ACTIVE", ""});
  if (!ethernet) return;
  const Json& gids = port["gids"];
  const bool ipv4 = std::any_of(gids.begin(), gids.end(), [](const Json& gid) {
    return gid["type"] == "RoCE v2" && is_ipv4_gid(gid["gid"].get<std::string>());
  });
  const std::string where = netdev.empty() ? "NETDEV" : netdev;
  if (!ipv4) {
    out.push_back({Grade::kWarn, name, kVerbs, "has no RoCE v2 GID with an IPv4 address",
                   absl::StrFormat("`ip addr add 10.0.0.1/24 dev %s`", where)});
  }
  const auto mtu = port.find("mtu");
  if (mtu != port.end() && *mtu < 4096) {
    out.push_back({Grade::kWarn, name, kVerbs,
                   absl::StrFormat("packets carry %s bytes: %s has an MTU of %s", mtu->dump(),
                                   where, port["netdev_mtu"].dump()),
                   absl::StrFormat("`ip link set dev %s mtu 4200` on both sides, if the switch "
                                   "allows it",
                                   where)});
  }
}

}  // namespace

void check_rdma(const Json& info, std::vector<Check>& out) {
  const Json& devices = info["rdma_devices"];
  if (devices.empty()) {
    out.push_back({Grade::kFail, "rdma devices", kVerbs, "no RDMA device found", soft_roce(info)});
    return;
  }
  out.push_back(
      {Grade::kOk, "rdma devices", kVerbs, absl::StrFormat("%u found", devices.size()), ""});
  check_access(info, out);
  bool active = false;
  for (const Json& device : devices) {
    for (const Json& port : device["ports"]) {
      check_port(device["name"].get<std::string>(), port, out);
      active = active || port["state"] == "ACTIVE";
    }
  }
  if (!active) {
    out.push_back({Grade::kFail, "rdma ports", kVerbs, "none is ACTIVE", "bring one up, as above"});
  }
  for (const Json& limit : info["limits"]["cgroup_rdma"]) {
    out.push_back({Grade::kWarn, "cgroup rdma", kVerbs,
                   absl::StrCat("this cgroup is limited: ", limit.get<std::string>()),
                   "write \"DEVICE hca_handle=max hca_object=max\" to rdma.max of the cgroup"});
  }
}

}  // namespace baton::bench
