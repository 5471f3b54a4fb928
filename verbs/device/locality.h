// The NUMA nodes of devices and memory, and the distances between nodes. A rail whose device is far
// from the memory gets a smaller share of the bytes.
//
// The facts come from sysfs. A machine with one node is not queried.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "transport/base/pci_path.h"

namespace baton::verbs {

class Locality {
 public:
  static constexpr int kUnknown = -1;

  virtual ~Locality() = default;
  // The node of an RDMA device ("mlx5_0"); of soft-RoCE, that of the network interface under it.
  virtual int device_node(const std::string& device) const = 0;
  // The node that holds most of a range of this process, judged by a few of its pages.
  virtual int memory_node(const void* base, size_t bytes) const = 0;
  // How much longer an access from one node to the other takes than within one: at least 1, which
  // stands for unknown too.
  virtual double distance(int from, int to) const = 0;
  // How far an RDMA device is from another device on the PCI bus ("0000:1b:00.0").
  virtual base::PciDistance pci_distance(const std::string& /*device*/,
                                         const std::string& /*address*/) const {
    return base::PciDistance::kUnknown;
  }

  static std::unique_ptr<Locality> of_this_machine();
  // Reads the facts from sysfs, which is mounted at `root`.
  static std::unique_ptr<Locality> from_sysfs(const std::string& root);
};

}  // namespace baton::verbs
