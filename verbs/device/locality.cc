// NUMA nodes as sysfs, the kernel and hwloc tell them.
#include "verbs/device/locality.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"

#ifdef BATON_HWLOC
#include <hwloc.h>
#endif

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

  const char* source() const override { return "sysfs"; }
  bool several_nodes() const {
    return access(absl::StrCat(root_, "/sys/devices/system/node/node1").c_str(), F_OK) == 0;
  }

 private:
  const std::string root_;
};

#ifdef BATON_HWLOC
class Hwloc final : public Locality {
 public:
  ~Hwloc() override {
    if (topology_ != nullptr) hwloc_topology_destroy(topology_);
  }

  bool load(const std::string& xml) {
    if (hwloc_topology_init(&topology_) != 0) return false;
    hwloc_topology_set_io_types_filter(topology_, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    if (!xml.empty() && hwloc_topology_set_xmlbuffer(topology_, xml.c_str(),
                                                     static_cast<int>(xml.size()) + 1) != 0) {
      return false;
    }
    return hwloc_topology_load(topology_) == 0;
  }

  int device_node(const std::string& device) const override {
    hwloc_obj_t found = nullptr;
    while ((found = hwloc_get_next_osdev(topology_, found)) != nullptr) {
      if (found->name == nullptr || device != found->name) continue;
      const hwloc_obj_t near = hwloc_get_non_io_ancestor_obj(topology_, found);
      // A device at the root of the tree is near to every node, or to none that is known.
      if (near == nullptr || hwloc_bitmap_weight(near->nodeset) != 1) return kUnknown;
      return hwloc_bitmap_first(near->nodeset);
    }
    return kUnknown;
  }

  int memory_node(const void* base, size_t bytes) const override {
    if (bytes == 0) return kUnknown;
    std::map<int, int> counts;
    const hwloc_bitmap_t nodes = hwloc_bitmap_alloc();
    for (void* page : samples_of(base, bytes)) {
      if (hwloc_get_area_memlocation(topology_, page, 1, nodes, HWLOC_MEMBIND_BYNODESET) == 0) {
        ++counts[hwloc_bitmap_first(nodes)];
      }
    }
    hwloc_bitmap_free(nodes);
    return most_frequent(counts);
  }

  double distance(int from, int to) const override {
    if (from < 0 || to < 0 || from == to) return 1;
    unsigned count = 1;
    hwloc_distances_s* matrix = nullptr;
    if (hwloc_distances_get_by_type(topology_, HWLOC_OBJ_NUMANODE, &count, &matrix,
                                    HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) != 0 ||
        count == 0) {
      return 1;
    }
    const hwloc_obj_t a =
        hwloc_get_numanode_obj_by_os_index(topology_, static_cast<unsigned>(from));
    const hwloc_obj_t b = hwloc_get_numanode_obj_by_os_index(topology_, static_cast<unsigned>(to));
    uint64_t there = 0, back = 0;
    double result = 1;
    if (a != nullptr && b != nullptr &&
        hwloc_distances_obj_pair_values(matrix, a, b, &there, &back) == 0) {
      result = std::max(1.0, static_cast<double>(there) / kLocal);
    }
    hwloc_distances_release(topology_, matrix);
    return result;
  }

  const char* source() const override { return "hwloc"; }

 private:
  hwloc_topology_t topology_ = nullptr;
};

// hwloc first, sysfs for what it does not know (the interfaces under soft-RoCE).
class Both final : public Locality {
 public:
  Both(std::unique_ptr<Locality> first, std::unique_ptr<Locality> second)
      : first_(std::move(first)), second_(std::move(second)) {}
  int device_node(const std::string& device) const override {
    const int node = first_->device_node(device);
    return node >= 0 ? node : second_->device_node(device);
  }
  int memory_node(const void* base, size_t bytes) const override {
    const int node = first_->memory_node(base, bytes);
    return node >= 0 ? node : second_->memory_node(base, bytes);
  }
  double distance(int from, int to) const override {
    return std::max(first_->distance(from, to), second_->distance(from, to));
  }
  base::PciDistance pci_distance(const std::string& device,
                                 const std::string& address) const override {
    return second_->pci_distance(device, address);
  }
  const char* source() const override { return first_->source(); }

 private:
  std::unique_ptr<Locality> first_, second_;
};
#endif

}  // namespace

std::unique_ptr<Locality> Locality::from_sysfs(const std::string& root) {
  return std::make_unique<Sysfs>(root);
}

std::unique_ptr<Locality> Locality::from_hwloc(const std::string& xml) {
#ifdef BATON_HWLOC
  auto made = std::make_unique<Hwloc>();
  if (made->load(xml)) return made;
#endif
  (void)xml;
  return nullptr;
}

std::unique_ptr<Locality> Locality::of_this_machine() {
  auto sysfs = std::make_unique<Sysfs>("");
#ifdef BATON_HWLOC
  // Reading the whole machine takes a while: only where there is something to choose.
  if (sysfs->several_nodes()) {
    if (auto hwloc = from_hwloc(""); hwloc != nullptr) {
      return std::make_unique<Both>(std::move(hwloc), std::move(sysfs));
    }
  }
#endif
  return sysfs;
}

}  // namespace baton::verbs
