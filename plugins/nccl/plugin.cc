// The plugin's settings, workers and words.
#include "plugins/nccl/plugin.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "plugins/nccl/net.h"
#include "transport/base/log.h"
#include "transport/net/endpoint.h"
#include "transport/net/interfaces.h"

namespace baton::nccl {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// NCCL's variables that are settings of Baton's under another name.
struct Alias {
  const char* variable;
  const char* setting;
};
constexpr std::array kAliases = {
    Alias{"NCCL_IB_GID_INDEX", "verbs.gid_index"},
    Alias{"NCCL_IB_TIMEOUT", "verbs.timeout"},
    Alias{"NCCL_IB_RETRY_CNT", "verbs.retry_count"},
    Alias{"NCCL_IB_SL", "verbs.service_level"},
    Alias{"NCCL_IB_TC", "verbs.traffic_class"},
    Alias{"NCCL_IB_QPS_PER_CONNECTION", "verbs.qps"},
    Alias{"NCCL_IB_PCI_RELAXED_ORDERING", "verbs.relaxed_ordering"},
    Alias{"NCCL_NSOCKS_PERTHREAD", "tcp.sockets"},
};
// Baton's defaults in this plugin; the environment overrides them. Lines that a device polls need
// PCIe's ordering. A comm closes within 50 ms, whatever its peer does. A grant's acknowledgement
// may wait for data: the next message carries it.
constexpr std::array kOwnDefaults = {Alias{"verbs.relaxed_ordering", "0"},
                                     Alias{"shm.fence_ms", "40"}, Alias{"tcp.ack_us", "2000"}};

// NCCL's lists: "eth,ib": names that begin so; "=eth0": that name; "^docker": all others.
class NameList {
 public:
  explicit NameList(std::string text) {
    if (excludes_ = text.starts_with('^'); excludes_) text.erase(0, 1);
    if (exact_ = text.starts_with('='); exact_) text.erase(0, 1);
    names_ = absl::StrSplit(text, ',', absl::SkipEmpty());
  }
  bool takes(const std::string& name) const {
    if (names_.empty()) return true;
    return excludes_ != std::any_of(names_.begin(), names_.end(), [&](const std::string& listed) {
             return exact_ ? name == listed : name.starts_with(listed);
           });
  }

 private:
  bool excludes_ = false, exact_ = false;
  std::vector<std::string> names_;
};

bool given(const SettingValues& values, std::string_view name) {
  return std::any_of(values.begin(), values.end(),
                     [&](const auto& entry) { return entry.first == name; });
}

// True if a provider in this library has a setting of this name.
bool known(std::string_view name) {
  static const std::vector<Setting> all = known_settings();
  return std::any_of(all.begin(), all.end(),
                     [&](const Setting& setting) { return setting.name == name; });
}

}  // namespace

absl::StatusOr<PluginSettings> PluginSettings::from_environment() {
  PluginSettings settings;
  settings.providers = absl::StrSplit(variable("BATON_NCCL_PROVIDERS"), ',', absl::SkipEmpty());
  for (const std::string& provider : settings.providers) {
    if (absl::Status status = check_provider(provider); !status.ok()) return status;
  }
  const std::string set = variable("BATON_NCCL_SET");
  for (const auto& text : absl::StrSplit(set, ',', absl::SkipEmpty())) {
    const absl::Status status = add_setting({text.data(), text.size()}, settings.values);
    if (!status.ok()) return status;
  }
  for (const Alias& alias : kAliases) {
    const std::string value = variable(alias.variable);
    // NCCL's 2 is its own choice.
    const bool left = value.empty() ||
                      (value == "2" && std::string_view(alias.setting) == "verbs.relaxed_ordering");
    if (!left && known(alias.setting) && !given(settings.values, alias.setting)) {
      settings.values.emplace_back(alias.setting, value);
    }
  }
  if (absl::Status status = check_settings(settings.values); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("an NCCL_* variable or BATON_NCCL_SET: ", status.message()));
  }
  settings.rdma = variable("NCCL_IB_DISABLE") != "1";
  settings.adapters = variable("NCCL_IB_HCA");
  const std::string wanted = variable("NCCL_SOCKET_IFNAME");
  if (wanted.empty()) return settings;
  const NameList list(wanted);
  std::vector<std::string> hosts;
  for (const auto& [name, address] : baton::net::own_addresses()) {
    if (!list.takes(name)) continue;
    if (settings.interface.empty()) settings.interface = name;
    hosts.push_back(baton::net::hosts_of(address.text()));
  }
  if (hosts.empty()) {
    return absl::NotFoundError(
        absl::StrCat("NCCL_SOCKET_IFNAME=", wanted,
                     ": no interface of this machine that it names has an address; `ip addr` lists "
                     "them"));
  }
  settings.advertise =
      absl::StrJoin(hosts.begin(), hosts.begin() + std::min<size_t>(8, hosts.size()), ",");
  return settings;
}

Plugin& Plugin::get() {
  static Plugin* const plugin = [] {
    auto* const made = new Plugin;
    // Before the libraries' own objects go: threads of workers use them.
    std::atexit([] { Plugin::get().reset(); });
    return made;
  }();
  return *plugin;
}

absl::Status Plugin::open(Logger log, int traffic_class) {
  set_logger(log);
  const std::lock_guard lock(mutex_);
  if (opened_) return status_;
  opened_ = true;
  absl::StatusOr<PluginSettings> settings = PluginSettings::from_environment();
  if (!settings.ok()) return status_ = settings.status();
  settings_ = *std::move(settings);
  if (traffic_class >= 0 && !given(settings_.values, "verbs.traffic_class")) {
    settings_.values.emplace_back("verbs.traffic_class", absl::StrCat(traffic_class));
  }
  for (const Alias& own : kOwnDefaults) {
    if (known(own.variable) && !given(settings_.values, own.variable)) {
      settings_.values.emplace_back(own.variable, own.setting);
    }
  }
  const auto& providers = settings_.providers;
  const bool rdma =
      settings_.rdma && (providers.empty() ||
                         std::find(providers.begin(), providers.end(), "verbs") != providers.end());
  devices_ = find_devices("", settings_.adapters, rdma, settings_.interface);
  hubs_.clear();
  hubs_.resize(devices_.size());
  std::vector<std::string> names;
  for (const Device& device : devices_) {
    names.push_back(
        absl::StrFormat("[%u]%s%s", names.size(), device.name, device.rdma ? "/RDMA" : ""));
  }
  say(LogLevel::kInfo,
      absl::StrFormat("using %s; providers: %s; %s", absl::StrJoin(names, " "),
                      providers.empty() ? "all" : absl::StrJoin(providers, ","),
                      settings_.advertise.empty() ? "all addresses" : settings_.advertise));
  return absl::OkStatus();
}

absl::Status Plugin::of_this_process() const {
  if (!made_here_.elsewhere()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the plugin belongs to the process that this one was forked from: start processes that use "
      "NCCL before it is initialised, or by exec");
}

absl::Status Plugin::check(int device) const {
  if (!status_.ok()) return status_;
  if (device < 0 || static_cast<size_t>(device) >= devices_.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("there is no device %d: there are %u, from 0", device, devices_.size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<WorkerOptions> Plugin::worker_options(int device) {
  if (absl::Status status = of_this_process(); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  if (absl::Status status = check(device); !status.ok()) return status;
  return options_for(devices_[device]);
}

absl::StatusOr<Hub*> Plugin::hub(int device, Role role) {
  // Before the lock, which a thread of the parent may have had at the fork.
  if (absl::Status status = of_this_process(); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  if (absl::Status status = check(device); !status.ok()) return status;
  std::unique_ptr<Hub>& hub = hubs_[device][role];
  if (hub == nullptr) {
    absl::StatusOr<std::unique_ptr<Hub>> made = make_hub(devices_[device], role);
    if (!made.ok()) return made.status();
    hub = *std::move(made);
  }
  return hub.get();
}

WorkerOptions Plugin::options_for(const Device& device) const {
  WorkerOptions options{.name = absl::StrCat("nccl-", device.name),
                        .providers = settings_.providers,
                        .listen_host = "*",
                        .advertise = settings_.advertise,
                        .max_transfers = 16384,
                        .settings = settings_.values};
  if (device.rdma && !given(options.settings, "verbs.devices")) {
    options.settings.emplace_back("verbs.devices", device.name);
  }
  return options;
}

absl::StatusOr<std::unique_ptr<Hub>> Plugin::make_hub(const Device& device, Role role) {
  WorkerOptions options = options_for(device);
  if (role == kCallsItself) options.name += "-self";
  absl::StatusOr<std::unique_ptr<Worker>> worker =
      make_ ? make_(std::move(options), role) : Worker::create(std::move(options));
  if (!worker.ok()) return worker.status();
  absl::StatusOr<std::unique_ptr<Hub>> hub = Hub::create(*std::move(worker), threads_);
  if (hub.ok()) net_door::open_door(**hub);
  return hub;
}

void Plugin::make_workers_by(MakeWorker make, bool threads) {
  make_ = std::move(make);
  threads_ = threads;
}

void Plugin::reset() {
  if (made_here_.elsewhere()) return;
  const std::lock_guard lock(mutex_);
  for (auto& hubs : hubs_) {
    for (auto& hub : hubs) {
      if (hub != nullptr) net_door::close_door(*hub);
      hub.reset();
    }
  }
  hubs_.clear();
  devices_.clear();
  opened_ = false;
  status_ = absl::OkStatus();
}

void Plugin::say(LogLevel level, const std::string& text) const {
  if (const Logger log = log_.load(std::memory_order_acquire); log != nullptr) {
    log(level, kInitLog | kNetLog, __FILE__, __LINE__, "NET/Baton : %s", text.c_str());
    return;
  }
  base::log_event(level == LogLevel::kWarn ? base::LogLevel::kWarning : base::LogLevel::kInfo,
                  "NET/Baton : %s", text);
}

Result result_of(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return Result::kSuccess;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return Result::kInvalidArgument;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
      return Result::kInvalidUsage;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnauthenticated:
      return Result::kRemoteError;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnimplemented:
      return Result::kSystemError;
    default:
      return Result::kInternalError;
  }
}

Result fail(const std::string& what, const absl::Status& status) {
  Plugin::get().say(LogLevel::kWarn, absl::StrCat(what, ": ", status.message()));
  return result_of(status);
}

// ncclEnvPlugin_v1 and v2: NCCL asks here for its settings before it reads any. What the
// environment has counts; where that names no network, this library names itself. So one variable,
// NCCL_ENV_PLUGIN with the path of this library, opens all doors.

namespace {

struct EnvV1 {
  const char* name;
  Result (*init)(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix);
  Result (*finalize)();
  const char* (*get)(const char* name);
};
struct EnvV2 {
  const char* name;
  Result (*init)(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix, Logger log);
  Result (*finalize)();
  const char* (*get)(const char* name);
};
static_assert(sizeof(EnvV1) == 32 && sizeof(EnvV2) == 32 && offsetof(EnvV2, get) == 24);

// Stays for the life of the process, as NCCL wants of what get() returns.
const char* own_path() {
  static const std::string path = [] {
    Dl_info info{};
    const bool found = dladdr(reinterpret_cast<const void*>(&own_path), &info) != 0;
    return std::string(found && info.dli_fname != nullptr ? info.dli_fname : "");
  }();
  return path.empty() ? nullptr : path.c_str();
}

const char* get_env(const char* name) {
  if (name == nullptr) return nullptr;
  const char* const value = std::getenv(name);
  if (value != nullptr) return value;
  return std::strcmp(name, "NCCL_NET_PLUGIN") == 0 ? own_path() : nullptr;
}

Result init_env_v2(uint8_t major, uint8_t minor, uint8_t patch, const char* /*suffix*/,
                   Logger log) {
  Plugin::get().set_logger(log);
  if (log != nullptr) {
    log(LogLevel::kInfo, kInitLog | kEnvLog, __FILE__, __LINE__,
        "ENV/Baton : opened by NCCL %d.%d.%d", major, minor, patch);
  }
  return Result::kSuccess;
}
Result init_env_v1(uint8_t major, uint8_t minor, uint8_t patch, const char* suffix) {
  return init_env_v2(major, minor, patch, suffix, nullptr);
}
Result finalize_env() { return Result::kSuccess; }

}  // namespace

extern "C" const EnvV1 ncclEnvPlugin_v1 = {kPluginName, init_env_v1, finalize_env, get_env};
extern "C" const EnvV2 ncclEnvPlugin_v2 = {kPluginName, init_env_v2, finalize_env, get_env};

}  // namespace baton::nccl
