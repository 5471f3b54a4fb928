// NUMA nodes as sysfs and the kernel tell them.
#include "verbs/device/locality.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"

namespace baton::verbs {
namespace {

// The firmware's unit: 10 is an access within a node.
constexpr double kLocal = 10;

int most_frequent(const std::map<int, int>& counts) {
  int best = Locality::kUnknown, count = 0;
  for (const auto& [node, times] : counts) {
    if (node >= 0 && times > count) {
      best = node;
      count = times;
    }
  }
  return best;
}

// Pages spread over the range, each at its middle.
constexpr size_t kSamples = 16;
std::array<void*, kSamples> samples_of(const void* base, size_t bytes) {
  std::array<void*, kSamples> pages;
  const auto first = reinterpret_cast<uintptr_t>(base);
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < kSamples; ++i) {
    const uintptr_t at = first + bytes / kSamples * i + bytes / kSamples / 2;
    pages[i] = reinterpret_cast<void*>(at / page * page);
  }
  return pages;
}

class Sysfs final : public Locality {
 public:
  explicit Sysfs(std::string root) : root_(std::move(root)) {}

  int device_node(const std::string& device) const override {
    const std::string path = absl::StrCat(root_, "/sys/class/infiniband/", device);
    int node = kUnknown;
    if (std::ifstream(path + "/device/numa_node") >> node && node >= 0) return node;
    std::string interface;
    if (!(std::ifstream(path + "/parent") >> interface)) return kUnknown;
    const std::string below =
        absl::StrCat(root_, "/sys/class/net/", interface, "/device/numa_node");
    return std::ifstream(below) >> node && node >= 0 ? node : kUnknown;
  }

  int memory_node(const void* base, size_t bytes) const override {
    if (bytes == 0 || !several_nodes()) return kUnknown;
    auto pages = samples_of(base, bytes);
    std::array<int, kSamples> nodes;
    nodes.fill(kUnknown);
    // Without nodes to move to, it tells where the pages are.
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) != 0) {
      return kUnknown;
    }
    std::map<int, int> counts;
    for (int node : nodes) ++counts[node];
    return most_frequent(counts);
  }

  double distance(int from, int to) const override {
    if (from < 0 || to < 0 || from == to) return 1;
    std::ifstream row(absl::StrCat(root_, "/sys/devices/system/node/node", from, "/distance"));
    double value = kLocal;
    for (int i = 0; i <= to; ++i) {
      if (!(row >> value)) return 1;
    }
    return std::max(1.0, value / kLocal);
  }

  base::PciDistance pci_distance(const std::string& device,
                                 const std::string& address) const override {
    return base::pci_distance(root_, base::rdma_path(root_, device),
                              base::pci_path(root_, address));
  }

  bool several_nodes() const {
    return access(absl::StrCat(root_, "/sys/devices/system/node/node1").c_str(), F_OK) == 0;
  }

 private:
  const std::string root_;
};

}  // namespace

std::unique_ptr<Locality> Locality::from_sysfs(const std::string& root) {
  return std::make_unique<Sysfs>(root);
}

std::unique_ptr<Locality> Locality::of_this_machine() { return from_sysfs(""); }

}  // namespace baton::verbs
