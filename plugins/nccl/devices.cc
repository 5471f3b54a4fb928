// The NICs of this machine, as sysfs tells of them.
#include <dirent.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "plugins/nccl/plugin.h"
#include "transport/base/pci_path.h"
#include "transport/net/interfaces.h"

namespace baton::nccl {
namespace {

constexpr int kUnknownSpeed = 10'000;

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const open = opendir(folder.c_str());
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open)) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  closedir(open);
  std::sort(names.begin(), names.end());
  return names;
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

int number_in(const std::string& line, int otherwise) {
  const int number = std::atoi(line.c_str());
  return number > 0 ? number : otherwise;
}

uint64_t guid_of(const std::string& line) {  // "0c42:a103:0012:3456"
  std::string digits = line;
  digits.erase(std::remove(digits.begin(), digits.end(), ':'), digits.end());
  return std::strtoull(digits.c_str(), nullptr, 16);
}

std::string real_path(const std::string& path) {
  char* const real = realpath(path.c_str(), nullptr);
  const std::string out = real == nullptr ? "" : real;
  std::free(real);
  return out;
}

// NCCL_IB_HCA: "mlx5": names that begin so; "=mlx5_0:1,mlx5_1": these; "^mlx5_2": all others.
bool wants(std::string_view list, const std::string& name, const std::string& port) {
  const bool excludes = list.starts_with('^');
  if (excludes) list.remove_prefix(1);
  const bool exact = list.starts_with('=');
  if (exact) list.remove_prefix(1);
  const std::vector<std::string> items = absl::StrSplit(std::string(list), ',', absl::SkipEmpty());
  if (items.empty()) return true;
  return excludes != std::any_of(items.begin(), items.end(), [&](const std::string& item) {
           const size_t colon = item.find(':');
           const std::string device = item.substr(0, colon);
           if (colon != std::string::npos && item.substr(colon + 1) != port) return false;
           return exact ? name == device : name.starts_with(device);
         });
}

void add_ports(const std::string& root, const std::string& name, std::string_view wanted,
               std::vector<Device>& out) {
  const std::string folder = absl::StrCat(root, "/sys/class/infiniband/", name);
  for (const std::string& port : names_in(folder + "/ports")) {
    const std::string at = absl::StrCat(folder, "/ports/", port);
    if (!wants(wanted, name, port) || !first_line(at + "/state").starts_with("4")) continue;
    Device device;
    device.name = absl::StrCat(name, ":", port);
    const std::string place = base::rdma_path(root, name);
    if (!place.empty()) device.pci_path = absl::StrCat(root, "/sys", place);
    device.guid = guid_of(first_line(folder + "/node_guid"));
    device.speed = number_in(first_line(at + "/rate"), kUnknownSpeed / 1000) * 1000;  // Gb/s there
    device.port = std::atoi(port.c_str());
    device.rdma = true;
    out.push_back(std::move(device));
  }
}

}  // namespace

std::vector<Device> find_devices(const std::string& root, std::string_view wanted, bool rdma,
                                 const std::string& interface) {
  std::vector<Device> devices;
  if (rdma) {
    for (const std::string& name : names_in(root + "/sys/class/infiniband")) {
      add_ports(root, name, wanted, devices);
    }
  }
  // Each door numbers devices alike, and so does every process of the machine.
  std::stable_sort(devices.begin(), devices.end(), [](const Device& a, const Device& b) {
    const auto address = [](const Device& device) {
      return device.pci_path.substr(device.pci_path.rfind('/') + 1);
    };
    return std::make_pair(address(a), a.name) < std::make_pair(address(b), b.name);
  });
  if (!devices.empty()) return devices;
  Device device;
  device.name = interface;
  if (device.name.empty()) {
    for (const auto& [name, address] : baton::net::own_addresses()) {
      if (name == "lo") continue;
      device.name = name;
      break;
    }
  }
  if (device.name.empty()) device.name = "lo";
  const std::string at = absl::StrCat(root, "/sys/class/net/", device.name);
  device.pci_path = real_path(at + "/device");
  device.speed = number_in(first_line(at + "/speed"), kUnknownSpeed);
  return {device};
}

}  // namespace baton::nccl
