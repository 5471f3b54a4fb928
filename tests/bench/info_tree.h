// A folder that looks like /proc and /sys of some machine.
#pragma once

#include <filesystem>
#include <string>

#include "bench/doctor/info.h"
#include "tests/temporary_folder.h"

namespace baton::bench {

class FakeTree {
 public:
  SystemRoot root() const { return SystemRoot(folder_.path()); }
  const std::string& path() const { return folder_.path(); }

  FakeTree& file(const std::string& path, const std::string& text) {
    folder_.file(path, text);
    return *this;
  }
  // A relative link, as sysfs has them: both paths are absolute on the fake machine.
  FakeTree& link(const std::string& path, const std::string& target) {
    const std::filesystem::path whole = folder_.path(path), aim = folder_.path(target);
    std::filesystem::create_directories(whole.parent_path());
    std::filesystem::create_directories(aim);
    std::filesystem::create_symlink(std::filesystem::relative(aim, whole.parent_path()), whole);
    return *this;
  }

  // A PCI device at the end of a path of bridges: "pci0000:00/0000:00:01.0/0000:01:00.0".
  FakeTree& pci(const std::string& chain, const std::string& vendor, const std::string& kind,
                int node) {
    const std::string name = chain.substr(chain.rfind('/') + 1);
    const std::string where = "/sys/devices/" + chain;
    file(where + "/vendor", vendor);
    file(where + "/class", kind);
    file(where + "/numa_node", std::to_string(node));
    return link("/sys/bus/pci/devices/" + name, where);
  }

  // An RDMA device of one active RoCE port on `netdev`.
  FakeTree& rdma(const std::string& name, const std::string& chain, const std::string& netdev,
                 const std::string& state = "4: ACTIVE") {
    const std::string where = "/sys/devices/" + chain + "/infiniband/" + name;
    const std::string port = where + "/ports/1";
    file(where + "/fw_ver", "28.39.1002");
    file(port + "/state", state);
    file(port + "/link_layer", "Ethernet");
    file(port + "/rate", "200 Gb/sec (4X HDR)");
    file(port + "/gids/0", "fe80:0000:0000:0000:0a00:27ff:fe00:0001");
    file(port + "/gid_attrs/types/0", "IB/RoCE v1");
    file(port + "/gid_attrs/ndevs/0", netdev);
    file(port + "/gids/1", "0000:0000:0000:0000:0000:ffff:0a00:0001");
    file(port + "/gid_attrs/types/1", "RoCE v2");
    file(port + "/gid_attrs/ndevs/1", netdev);
    file(port + "/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000");
    file(port + "/hw_counters/out_of_sequence", "7");
    file(port + "/hw_counters/rnr_nak_retry_err", "0");
    return link("/sys/class/infiniband/" + name, where);
  }
  FakeTree& netdev(const std::string& name, const std::string& state, int mtu) {
    file("/sys/class/net/" + name + "/operstate", state);
    return file("/sys/class/net/" + name + "/mtu", std::to_string(mtu));
  }
  // Rows of /proc/self/limits.
  FakeTree& limits(const std::string& memlock, const std::string& files) {
    return file("/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units     \n"
                "Max open files            " +
                    files + " " + files + " files\n" + "Max locked memory         " + memlock +
                    " unlimited bytes");
  }

 private:
  TemporaryFolder folder_;
};

}  // namespace baton::bench
