// Reads the tree of PCI devices in sysfs.
#include "transport/base/pci_path.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace baton::base {
namespace {

// The target of a link in sysfs, without `root` and "/sys"; empty if it is broken.
std::string resolved(const std::string& root, const std::string& link) {
  std::error_code none;
  const std::filesystem::path top = std::filesystem::canonical(root + "/sys", none);
  if (none) return "";
  const std::filesystem::path end = std::filesystem::canonical(root + link, none);
  if (none) return "";
  const std::string path = end.string();
  return path.rfind(top.string(), 0) == 0 ? path.substr(top.string().size()) : "";
}

int node_of(const std::string& root, const std::string& path) {
  int node = -1;
  if (!(std::ifstream(absl::StrCat(root, "/sys", path, "/numa_node")) >> node)) return -1;
  return node;
}

// "pci0000:16": a root complex, and no device.
bool is_root(const std::string& part) { return part.rfind("pci", 0) == 0; }

}  // namespace

const char* name_of(PciDistance distance) {
  constexpr const char* kNames[] = {"", "PIX", "PXB", "PHB", "NODE", "SYS"};
  return kNames[static_cast<size_t>(distance)];
}

const char* words(PciDistance distance) {
  constexpr const char* kWords[] = {"at an unknown distance", "behind one PCIe switch",
                                    "behind one PCIe tree",   "at one PCIe host bridge",
                                    "on one NUMA node",       "across NUMA nodes"};
  return kWords[static_cast<size_t>(distance)];
}

double cost(PciDistance distance) {
  constexpr double kCosts[] = {1, 1, 1, 1.5, 2, 4};
  return kCosts[static_cast<size_t>(distance)];
}

std::string pci_path(const std::string& root, const std::string& address) {
  if (address.empty() || address.find('/') != std::string::npos) return "";
  return resolved(root, absl::StrCat("/sys/bus/pci/devices/", address));
}

std::string rdma_path(const std::string& root, const std::string& device) {
  const std::string at = absl::StrCat("/sys/class/infiniband/", device);
  if (std::string path = resolved(root, at + "/device"); !path.empty()) return path;
  std::string interface;
  if (!(std::ifstream(root + at + "/parent") >> interface)) return "";
  return resolved(root, absl::StrCat("/sys/class/net/", interface, "/device"));
}

PciDistance pci_distance(const std::string& root, const std::string& one,
                         const std::string& other) {
  if (one.empty() || other.empty()) return PciDistance::kUnknown;
  const std::vector<std::string> a = absl::StrSplit(one, '/', absl::SkipEmpty());
  const std::vector<std::string> b = absl::StrSplit(other, '/', absl::SkipEmpty());
  const auto ways = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto common = std::find_if(a.begin(), ways.first, is_root);
  if (common != ways.first) {
    if (ways.first - common == 1) return PciDistance::kPhb;
    // Below one switch: the port of the switch and the device itself, on either side.
    const auto steps = (a.end() - ways.first) + (b.end() - ways.second);
    return steps <= 4 ? PciDistance::kPix : PciDistance::kPxb;
  }
  const int nodes[] = {node_of(root, one), node_of(root, other)};
  return nodes[0] >= 0 && nodes[0] == nodes[1] ? PciDistance::kNode : PciDistance::kSys;
}

}  // namespace baton::base
