// How far two PCI devices are from each other, as sysfs tells it: a GPU and a network adapter
// behind one switch move bytes past the processor, and those at two sockets through both.
#pragma once

#include <cstdint>
#include <string>

namespace baton::base {

// In the words of nvidia-smi.
enum class PciDistance : uint8_t {
  kUnknown,
  kPix,   // one switch
  kPxb,   // several
  kPhb,   // the host bridge
  kNode,  // between host bridges of a NUMA node
  kSys,   // between NUMA nodes
};
const char* name_of(PciDistance distance);  // "PIX"; "" where it is unknown
const char* words(PciDistance distance);    // "behind one PCIe switch"
// How much less of the work a way of that distance gets than one by a switch: at least 1, which
// stands for unknown too.
double cost(PciDistance distance);

// A device's path in the tree: "/devices/pci0000:16/0000:16:01.0/0000:17:00.0"; empty if it is not
// known. sysfs is mounted below `root`.
std::string pci_path(const std::string& root, const std::string& address);  // "0000:1b:00.0"
// The path of an RDMA device ("mlx5_0"); for soft-RoCE, that of its network interface.
std::string rdma_path(const std::string& root, const std::string& device);
// Between two such places.
PciDistance pci_distance(const std::string& root, const std::string& one, const std::string& other);

}  // namespace baton::base
