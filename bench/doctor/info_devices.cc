// Reads RDMA devices and GPUs from sysfs: class/infiniband, bus/pci and the tree of PCI bridges;
// and asks the CUDA driver.
#include "bench/doctor/info.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gpudirect/facts.h"
#include "transport/base/pci_path.h"

namespace baton::bench {
namespace {

constexpr const char* kInfiniband = "/sys/class/infiniband/";
constexpr const char* kPci = "/sys/bus/pci/devices/";
constexpr const char* kNvidia = "0x10de";
constexpr uint64_t kRoceHeaders = 80;  // of the largest packet: what rdma_rxe leaves room for

Json number_or_null(const std::optional<uint64_t>& number) {
  return number ? Json(*number) : Json();
}

uint64_t roce_mtu(uint64_t netdev_mtu) {
  uint64_t mtu = 4096;
  while (mtu > 256 && mtu + kRoceHeaders > netdev_mtu) mtu /= 2;
  return mtu;
}

bool is_pci(const std::string& name) {
  return name.size() >= 12 && name[4] == ':' && name[7] == ':' && name[10] == '.';
}

// The PCI device that a class device belongs to: the last on its path.
std::string pci_of(const SystemRoot& root, const std::string& path) {
  std::string pci;
  for (const auto part : absl::StrSplit(root.real(path), '/', absl::SkipEmpty())) {
    if (is_pci(std::string(part))) pci = std::string(part);
  }
  return pci;
}

// -1 is what the kernel says on machines without NUMA.
Json numa_node(const SystemRoot& root, const std::string& pci) {
  return pci.empty() ? Json() : number_or_null(root.number(absl::StrCat(kPci, pci, "/numa_node")));
}

// "32.0 GT/s PCIe x16", of the link as it is or as it can be; null where that is not known.
Json pcie_link(const SystemRoot& root, const std::string& path, const char* which) {
  const std::string speed = root.text(absl::StrCat(path, "/", which, "_link_speed"));
  const auto width = root.number(absl::StrCat(path, "/", which, "_link_width"));
  if (speed.empty() || speed == "Unknown" || !width || *width == 0) return {};
  return absl::StrCat(speed, " x", *width);
}

// The window through which others on the bus reach the GPU's memory: the second of the device's
// regions, each of which is a line "0x<first> 0x<last> 0x<flags>".
Json bar1_bytes(const SystemRoot& root, const std::string& path) {
  const std::vector<std::string> lines = absl::StrSplit(root.text(path + "/resource"), '\n');
  unsigned long long first = 0, last = 0;
  if (lines.size() < 2 || std::sscanf(lines[1].c_str(), "%llx %llx", &first, &last) != 2) return {};
  return last > first ? Json(last - first + 1) : Json();
}

// "DMA", "identity", ...: what becomes of addresses that the device uses; null: no IOMMU, or the
// kernel does not say.
Json iommu(const SystemRoot& root, const std::string& path) {
  const std::string type = root.text(path + "/iommu_group/type");
  return type.empty() ? Json() : Json(type);
}

Json read_gids(const SystemRoot& root, const std::string& port) {
  Json gids = Json::array();
  for (const std::string& index : root.list(port + "/gids")) {
    const std::string gid = root.text(absl::StrCat(port, "/gids/", index));
    if (gid.find_first_not_of("0:") == std::string::npos) continue;  // unused
    gids.push_back({{"index", std::atoi(index.c_str())},
                    {"gid", gid},
                    {"type", root.text(absl::StrCat(port, "/gid_attrs/types/", index))},
                    {"netdev", root.text(absl::StrCat(port, "/gid_attrs/ndevs/", index))}});
  }
  return gids;
}

// The port's counters that are not zero.
Json read_counters(const SystemRoot& root, const std::string& port) {
  Json out = Json::object();
  for (const char* folder : {"/counters/", "/hw_counters/"}) {
    for (const std::string& name : root.list(port + folder)) {
      const auto value = root.number(absl::StrCat(port, folder, name));
      if (value && *value != 0) out[name] = *value;
    }
  }
  return out;
}

Json read_port(const SystemRoot& root, const std::string& path, const std::string& number) {
  const std::string state = root.text(path + "/state");  // "4: ACTIVE"
  const size_t colon = state.find(": ");
  Json port = {{"number", std::atoi(number.c_str())},
               {"state", colon == std::string::npos ? state : state.substr(colon + 2)},
               {"link_layer", root.text(path + "/link_layer")},
               {"rate", root.text(path + "/rate")}};
  port["gids"] = read_gids(root, path);
  port["counters"] = read_counters(root, path);
  std::string netdev;
  for (const Json& gid : port["gids"]) {
    if (netdev.empty()) netdev = gid["netdev"].get<std::string>();
  }
  if (netdev.empty()) netdev = root.text(path + "/gid_attrs/ndevs/0");
  if (netdev.empty()) return port;
  port["netdev"] = netdev;
  if (const auto mtu = root.number(absl::StrCat("/sys/class/net/", netdev, "/mtu"))) {
    port["netdev_mtu"] = *mtu;
    if (port["link_layer"] == "Ethernet") port["mtu"] = roce_mtu(*mtu);
  }
  return port;
}

}  // namespace

bool is_ipv4_gid(const std::string& gid) {
  return absl::StartsWith(gid, "0000:0000:0000:0000:0000:ffff:");
}

Json rdma_devices(const SystemRoot& root) {
  Json devices = Json::array();
  for (const std::string& name : root.list(kInfiniband)) {
    const std::string path = kInfiniband + name;
    const std::string pci = pci_of(root, path);
    Json device = {{"name", name},
                   {"pci", pci.empty() ? Json() : Json(pci)},
                   {"numa_node", numa_node(root, pci)},
                   {"firmware", root.text(path + "/fw_ver")}};
    device["ports"] = Json::array();
    for (const std::string& number : root.list(path + "/ports")) {
      device["ports"].push_back(read_port(root, absl::StrCat(path, "/ports/", number), number));
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

Json gpus(const SystemRoot& root) {
  Json found = Json::array();
  for (const std::string& pci : root.list(kPci)) {
    const std::string path = kPci + pci;
    // Class 0x03xxxx: display controllers, among them GPUs without a display (0x0302xx).
    if (root.text(path + "/vendor") != kNvidia) continue;
    if (!absl::StartsWith(root.text(path + "/class"), "0x03")) continue;
    const std::string driver = root.real(path + "/driver");
    found.push_back(
        {{"pci", pci},
         {"numa_node", numa_node(root, pci)},
         {"driver", driver.empty() ? Json() : Json(driver.substr(driver.rfind('/') + 1))},
         {"link", pcie_link(root, path, "current")},
         {"best_link", pcie_link(root, path, "max")},
         {"bar1_bytes", bar1_bytes(root, path)},
         {"iommu", iommu(root, path)}});
  }
  return found;
}

Json distances(const SystemRoot& root, const Json& devices, const Json& gpu_list) {
  Json out = Json::array();
  const auto path = [&](const Json& pci) {
    return base::pci_path(root.prefix(), pci.get<std::string>());
  };
  for (const Json& device : devices) {
    for (const Json& gpu : gpu_list) {
      if (device["pci"].is_null()) continue;
      const auto distance =
          base::pci_distance(root.prefix(), path(device["pci"]), path(gpu["pci"]));
      if (distance == base::PciDistance::kUnknown) continue;
      out.push_back(
          {{"rdma", device["name"]}, {"gpu", gpu["pci"]}, {"distance", base::name_of(distance)}});
    }
  }
  return out;
}

namespace {

Json as_json(const gpudirect::Driver& driver, const gpudirect::DeviceFacts& facts, bool peermem) {
  Json out = Json::parse(facts.json());
  const absl::Status reachable = gpudirect::reachable_by_adapters(driver, facts);
  const absl::Status by_address = gpudirect::reachable_by_address(driver, facts, peermem);
  const bool staged = !reachable.ok() && !by_address.ok();
  out["path"] = reachable.ok() ? "dma-buf" : staged ? "staged" : "nvidia-peermem";
  out["why_no_dma_buf"] = std::string(reachable.message());
  out["why_staged"] =
      staged ? absl::StrFormat("%s; %s", reachable.message(), by_address.message()) : "";
  return out;
}

}  // namespace

Json cuda_info(const absl::StatusOr<const gpudirect::Driver*>& driver, const std::string& root) {
  Json out = {{"driver", nullptr}, {"why", ""}, {"devices", Json::array()}};
  if (!driver.ok()) {
    out["why"] = std::string(driver.status().message());
    return out;
  }
  const int version = (*driver)->version;
  out["driver"] = absl::StrFormat("%d.%d", version / 1000, version % 1000 / 10);
  const bool peermem = gpudirect::peermem_loaded(root);
  int count = 0;
  absl::Status status =
      gpudirect::driver_status(**driver, (*driver)->cuDeviceGetCount(&count), "counting GPUs");
  for (int i = 0; i < count && status.ok(); ++i) {
    const auto facts = gpudirect::query_facts(**driver, i);
    if (facts.ok()) out["devices"].push_back(as_json(**driver, *facts, peermem));
    status = facts.status();
  }
  if (!status.ok()) out["why"] = std::string(status.message());
  return out;
}

}  // namespace baton::bench
