// RDMA devices and GPUs as sysfs shows them, and how far they are from each other.
#pragma once

#include <string>

#include "bench/doctor/info_root.h"
#include "bench/report/report.h"

namespace baton::bench {

// [{"name","pci","numa_node","firmware","ports":[{"number","state","link_layer","rate","netdev",
//   "netdev_mtu","mtu","gids":[{"index","gid","type","netdev"}],"counters":{}}]}]. "mtu" is the
//   largest RoCE MTU
// that fits into the MTU of the network device.
Json rdma_devices(const SystemRoot& root);

// NVIDIA GPUs: [{"pci","numa_node","driver","link","best_link","bar1_bytes","iommu"}]. A link is
// slower while its GPU has nothing to do.
Json gpus(const SystemRoot& root);

// [{"rdma","gpu","distance"}] for every pair that has a place on the PCI bus.
Json distances(const SystemRoot& root, const Json& devices, const Json& gpus);

// How two PCI devices ("0000:01:00.0") reach each other, in the words of nvidia-smi: PIX (one
// switch), PXB (several), PHB (the host bridge), NODE (between host bridges of a NUMA node), SYS
// (between NUMA nodes); "" where one of them is unknown.
std::string pci_distance(const SystemRoot& root, const std::string& a, const std::string& b);

// An IPv4 address in a GID: ::ffff:a.b.c.d.
bool is_ipv4_gid(const std::string& gid);

}  // namespace baton::bench
