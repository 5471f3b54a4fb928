// `baton info`: what this machine has, as text or as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/report/report.h"
#include "gpudirect/driver.h"

namespace baton::bench {

// Reads /proc and /sys, of this machine or of a tree of files that looks like one.
// Every reader below takes one, so that tests can show it other machines. Paths are absolute, as on
// the machine itself.
class SystemRoot {
 public:
  explicit SystemRoot(std::string prefix = "") : prefix_(std::move(prefix)) {}

  const std::string& prefix() const { return prefix_; }
  bool exists(const std::string& path) const;
  // May be opened for reading and writing.
  bool writable(const std::string& path) const;
  // The content without the white space at its end, at most 1 MiB; "" if it cannot be read.
  std::string text(const std::string& path) const;
  // The number that the content begins with.
  std::optional<uint64_t> number(const std::string& path) const;
  // The names in a folder, numbers in their order; empty where there is none.
  std::vector<std::string> list(const std::string& path) const;
  // The path with its links followed, from the root on; "" where it leads nowhere.
  std::string real(const std::string& path) const;

 private:
  std::string prefix_;
};

// Everything there is to know: {"baton","kernel","providers","rdma_devices","gpus","nvidia","cuda",
// "distances","limits","memory","network","numa"}. `providers` comes from probe_providers().
// `cuda` from cuda_info(); null: no caller asked, as for another machine's tree.
Json collect_info(const SystemRoot& root, Json providers, Json cuda = nullptr);
// The same of this machine, with its CUDA devices; or of another one's /proc and /sys, which lie
// below `folder`.
Json machine_info(const std::string& folder);

std::string info_text(const Json& info);

int info_main(int argc, char** argv);

// The command line that info and doctor share.
struct InfoOptions {
  std::string root;      // read /proc and /sys below this folder
  std::string provider;  // doctor: judge for this one
  bool json = false;
  bool settings = false;  // info: only the settings and environment variables
  bool markdown = false;  // these as docs/settings.md has them
  std::string file;       // for the JSON; "": standard output
};
// The exit status to leave with at once, or -1.
int parse_info(int argc, const char* const* argv, bool doctor, InfoOptions& options);

// Prints JSON where the options say.
absl::Status print_json(const InfoOptions& options, const Json& json);

// {"release","modules":{NAME:"loaded"|"available"|"missing"},"ptrace_scope",
//  "dma_buf_registration","virtual"}; virtual: below a hypervisor.
Json kernel_info(const SystemRoot& root);
// {"memlock":{"soft","hard"},"ipc_lock","open_files","cgroup_memory","cgroup_rdma","uverbs"};
// null: no limit.
Json limits_info(const SystemRoot& root);
// {"huge_pages":[{"kib","total","free"}],"transparent","transparent_shmem"}
Json memory_info(const SystemRoot& root);
// {"congestion","available","rmem_max","wmem_max","netdevs":[{"name","state","mtu"}]}
Json network_info(const SystemRoot& root);
// [{"node","cpus","distances"}]
Json numa_info(const SystemRoot& root);
// {"driver","open_module","peermem","gdrdrv"}; driver is null without a driver.
Json nvidia_info(const SystemRoot& root);

// [{"name","pci","numa_node","firmware","ports":[{"number","state","link_layer","rate","netdev",
//   "netdev_mtu","mtu","gids":[{"index","gid","type","netdev"}],"counters":{}}]}]. "mtu" is the
//   largest RoCE MTU
// that fits into the MTU of the network device.
Json rdma_devices(const SystemRoot& root);

// NVIDIA GPUs: [{"pci","numa_node","driver","link","best_link","bar1_bytes","iommu"}]. A link is
// slower while its GPU has nothing to do.
Json gpus(const SystemRoot& root);

// [{"rdma","gpu","distance"}] for every pair that has a place on the PCI bus: base::PciDistance by
// its name.
Json distances(const SystemRoot& root, const Json& devices, const Json& gpus);

// An IPv4 address in a GID: ::ffff:a.b.c.d.
bool is_ipv4_gid(const std::string& gid);

// Makes each provider and lets it listen, on loopback, for a moment:
// [{"name","usable","rank","detail"}], best rank first. `detail` holds devices and features, or the
// reason and the remedy. One that workers have on request only (UCX) is made in a child: it may end
// the process that loads it. Providers that Baton has and this program does not are listed too.
Json probe_providers();

// `baton info --settings`: every setting and environment variable of this program.

// {"settings": [{"name","unit","default","range","meaning"}], "environment": [{"name","default",
// "meaning"}]}, by name. The settings are those of the providers that are linked.
Json settings_info();

std::string settings_text(const Json& info);

// docs/settings.md as it should be: its test compares, `baton info --settings --markdown` makes it.
std::string settings_markdown(const Json& info);

// {"driver","why","devices":[{"ordinal","name","pci","memory_bytes", and each fact by its name,
// "path","why_no_dma_buf","why_staged","writes_of_adapters"}]}. "path": "dma-buf" or
// "nvidia-peermem" where adapters can be given its memory, else "staged", and why. "driver" is the
// CUDA version, null where there is none ("why" says it then); a fact that the driver does not know
// is null. `driver`: gpudirect::machine_driver(). Sysfs lies below `root`.
Json cuda_info(const absl::StatusOr<const gpudirect::Driver*>& driver,
               const std::string& root = "");

}  // namespace baton::bench
