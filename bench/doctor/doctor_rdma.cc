// The checks of `baton doctor` on RDMA devices: present, permitted, port up, with an address.
#include <algorithm>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/doctor/doctor.h"
#include "bench/doctor/info.h"

namespace baton::bench {
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
