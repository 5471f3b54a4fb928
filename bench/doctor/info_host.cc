// Reads what kernel and process allow from /proc and /sys, each fact where the kernel keeps it.
#include "bench/doctor/info.h"

#include <unistd.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace baton::bench {
namespace {

constexpr std::array kModules = {"ib_uverbs", "rdma_rxe",       "siw",
                                 "nvidia",    "nvidia_peermem", "gdrdrv"};
constexpr int kCapIpcLock = 14;

std::string module_state(const SystemRoot& root, const std::string& release,
                         const std::string& name) {
  if (root.exists("/sys/module/" + name)) return "loaded";
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  for (const char* list : {"modules.dep", "modules.builtin"}) {
    const std::string text = root.text(absl::StrCat("/lib/modules/", release, "/", list));
    for (const std::string& spelt : {name, dashed}) {
      if (text.find(absl::StrCat("/", spelt, ".ko")) != std::string::npos) return "available";
    }
  }
  return "missing";
}

// The word in brackets: "always [madvise] never".
std::string chosen(const std::string& text) {
  const size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close < open ? text : text.substr(open + 1, close - open - 1);
}

// A row of /proc/self/limits: soft and hard limit, null for unlimited.
Json limit_row(const std::string& limits, const std::string& name) {
  const auto number = [](const std::string& word) {
    uint64_t value = 0;
    return absl::SimpleAtoi(word, &value) ? Json(value) : Json();
  };
  for (const auto line : absl::StrSplit(limits, '\n')) {
    if (!absl::StartsWith(line, name)) continue;
    std::istringstream words{std::string(line.substr(name.size()))};
    std::string soft, hard;
    words >> soft >> hard;
    return {{"soft", number(soft)}, {"hard", number(hard)}};
  }
  return {{"soft", Json()}, {"hard", Json()}};
}

bool has_capability(const SystemRoot& root, int bit) {
  for (const auto line : absl::StrSplit(root.text("/proc/self/status"), '\n')) {
    if (!absl::StartsWith(line, "CapEff:")) continue;
    const std::string digits(absl::StripAsciiWhitespace(line.substr(7)));
    uint64_t mask = 0;
    std::from_chars(digits.data(), digits.data() + digits.size(), mask, 16);
    return (mask >> bit & 1) != 0;
  }
  return false;
}

// The least `file` among the cgroups that this process is in and those above them; null for none.
Json cgroup_limit(const SystemRoot& root, const std::string& v1_controller, const char* v1_file,
                  const char* v2_file) {
  Json least;
  const auto consider = [&](const std::string& folder, std::string path, const char* file) {
    while (true) {
      if (const auto limit = root.number(absl::StrCat(folder, path, "/", file));
          limit && *limit < uint64_t{1} << 62 && (least.is_null() || *limit < least)) {
        least = *limit;
      }
      if (path.empty()) return;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  };
  for (const auto line : absl::StrSplit(root.text("/proc/self/cgroup"), '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string path = parts[2] == "/" ? "" : parts[2];
    if (parts[1].empty()) consider("/sys/fs/cgroup", path, v2_file);
    if (parts[1] == v1_controller) consider("/sys/fs/cgroup/" + v1_controller, path, v1_file);
  }
  return least;
}

// The limits of rdma.max that are none of "max": ["mlx5_0 hca_handle=2"].
Json cgroup_rdma(const SystemRoot& root) {
  Json out = Json::array();
  for (const auto line : absl::StrSplit(root.text("/proc/self/cgroup"), '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !(parts[1].empty() || parts[1] == "rdma")) continue;
    const std::string folder =
        parts[1].empty() ? "/sys/fs/cgroup" : std::string("/sys/fs/cgroup/rdma");
    const std::string text = root.text(absl::StrCat(folder, parts[2], "/rdma.max"));
    for (const auto row : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> words = absl::StrSplit(row, ' ');
      for (size_t i = 1; i < words.size(); ++i) {
        if (!absl::EndsWith(words[i], "=max")) out.push_back(absl::StrCat(words[0], " ", words[i]));
      }
    }
  }
  return out;
}

Json or_null(const std::optional<uint64_t>& number) { return number ? Json(*number) : Json(); }
Json or_null(const std::string& text) { return text.empty() ? Json() : Json(text); }

}  // namespace

Json kernel_info(const SystemRoot& root) {
  const std::string release = root.text("/proc/sys/kernel/osrelease");
  Json out = {{"release", release}};
  out["modules"] = Json::object();
  for (const char* name : kModules) out["modules"][name] = module_state(root, release, name);
  out["ptrace_scope"] = or_null(root.number("/proc/sys/kernel/yama/ptrace_scope"));
  int major = 0, minor = 0;
  const bool known = std::sscanf(release.c_str(), "%d.%d", &major, &minor) == 2;
  out["dma_buf_registration"] = known && (major > 5 || (major == 5 && minor >= 12));
  out["virtual"] = absl::StrContains(root.text("/proc/cpuinfo"), " hypervisor");
  return out;
}

Json limits_info(const SystemRoot& root) {
  const std::string limits = root.text("/proc/self/limits");
  Json out = {
      {"memlock", limit_row(limits, "Max locked memory")},
      {"ipc_lock", has_capability(root, kCapIpcLock)},
      {"open_files", limit_row(limits, "Max open files")},
      {"cgroup_memory", cgroup_limit(root, "memory", "memory.limit_in_bytes", "memory.max")},
      {"cgroup_rdma", cgroup_rdma(root)}};
  out["uverbs"] = Json::array();
  for (const std::string& name : root.list("/dev/infiniband")) {
    if (!absl::StartsWith(name, "uverbs")) continue;
    const std::string path = "/dev/infiniband/" + name;
    out["uverbs"].push_back({{"path", path}, {"usable", root.writable(path)}});
  }
  return out;
}

Json memory_info(const SystemRoot& root) {
  Json out = {{"huge_pages", Json::array()}};
  const std::string folder = "/sys/kernel/mm/hugepages/";
  for (const std::string& name : root.list(folder)) {
    uint64_t kib = 0;
    if (std::sscanf(name.c_str(), "hugepages-%lukB", &kib) != 1) continue;
    out["huge_pages"].push_back(
        {{"kib", kib},
         {"total", or_null(root.number(folder + name + "/nr_hugepages"))},
         {"free", or_null(root.number(folder + name + "/free_hugepages"))}});
  }
  const std::string thp = "/sys/kernel/mm/transparent_hugepage/";
  out["transparent"] = or_null(chosen(root.text(thp + "enabled")));
  out["transparent_shmem"] = or_null(chosen(root.text(thp + "shmem_enabled")));
  return out;
}

Json network_info(const SystemRoot& root) {
  const std::string ipv4 = "/proc/sys/net/ipv4/", core = "/proc/sys/net/core/";
  Json out = {{"congestion", or_null(root.text(ipv4 + "tcp_congestion_control"))},
              {"available", or_null(root.text(ipv4 + "tcp_available_congestion_control"))},
              {"rmem_max", or_null(root.number(core + "rmem_max"))},
              {"wmem_max", or_null(root.number(core + "wmem_max"))}};
  out["netdevs"] = Json::array();
  for (const std::string& name : root.list("/sys/class/net")) {
    const std::string path = "/sys/class/net/" + name;
    if (!root.exists(path + "/mtu")) continue;
    out["netdevs"].push_back({{"name", name},
                              {"state", root.text(path + "/operstate")},
                              {"mtu", or_null(root.number(path + "/mtu"))}});
  }
  return out;
}

Json numa_info(const SystemRoot& root) {
  Json nodes = Json::array();
  for (const std::string& name : root.list("/sys/devices/system/node")) {
    int node = 0;
    if (std::sscanf(name.c_str(), "node%d", &node) != 1) continue;
    const std::string path = "/sys/devices/system/node/" + name;
    nodes.push_back({{"node", node},
                     {"cpus", root.text(path + "/cpulist")},
                     {"distances", root.text(path + "/distance")}});
  }
  return nodes;
}

Json nvidia_info(const SystemRoot& root) {
  const std::string version = root.text("/proc/driver/nvidia/version");
  Json out = {{"driver", Json()},
              {"open_module", version.find("Open Kernel Module") != std::string::npos},
              {"peermem", root.exists("/sys/module/nvidia_peermem")},
              {"gdrdrv", root.exists("/sys/module/gdrdrv")}};
  if (version.empty()) return out;
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ...": the first number with
  // a dot in it.
  for (const auto word : absl::StrSplit(version, absl::ByAnyChar(" \n"), absl::SkipEmpty())) {
    const bool digits = word.find_first_not_of("0123456789.") == std::string::npos;
    if (digits && word.find('.') != std::string::npos) {
      out["driver"] = std::string(word);
      return out;
    }
  }
  out["driver"] = "unknown";
  return out;
}

namespace {

namespace fs = std::filesystem;
constexpr size_t kMostText = 1 << 20;

// "2" before "10", "eth0" before "eth1".
bool before(const std::string& a, const std::string& b) {
  const bool numbers = !a.empty() && !b.empty() &&
                       a.find_first_not_of("0123456789") == std::string::npos &&
                       b.find_first_not_of("0123456789") == std::string::npos;
  if (numbers && a.size() != b.size()) return a.size() < b.size();
  return a < b;
}

}  // namespace

bool SystemRoot::exists(const std::string& path) const {
  std::error_code error;
  return fs::exists(prefix_ + path, error);
}

bool SystemRoot::writable(const std::string& path) const {
  return access((prefix_ + path).c_str(), R_OK | W_OK) == 0;
}

std::string SystemRoot::text(const std::string& path) const {
  std::ifstream file(prefix_ + path);
  std::string out(kMostText, '\0');
  file.read(out.data(), static_cast<std::streamsize>(out.size()));
  out.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  out.erase(out.find_last_not_of(" \t\r\n") + 1);
  return out;
}

std::optional<uint64_t> SystemRoot::number(const std::string& path) const {
  const std::string content = text(path);
  uint64_t value = 0;
  const auto end = std::from_chars(content.data(), content.data() + content.size(), value);
  return end.ec == std::errc() ? std::optional(value) : std::nullopt;
}

std::vector<std::string> SystemRoot::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(prefix_ + path, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::sort(names.begin(), names.end(), before);
  return names;
}

std::string SystemRoot::real(const std::string& path) const {
  std::error_code error;
  const std::string root = prefix_.empty() ? "" : fs::canonical(prefix_, error).string();
  const std::string resolved = fs::canonical(prefix_ + path, error).string();
  if (error || resolved.compare(0, root.size(), root) != 0) return "";
  return resolved.substr(root.size());
}

}  // namespace baton::bench
