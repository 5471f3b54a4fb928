// The plugin's state that a process has once, whichever of its interfaces NCCL opens: NCCL's
// logger, settings from the environment, and the devices, each with a hub (hub.h) that all of its
// comms share.
//
// Threads: every function may be called from any thread. No function throws. NCCL gets a Result;
// the reason is one line in NCCL's log (fail()).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "plugins/nccl/abi.h"
#include "plugins/nccl/hub.h"
#include "transport/base/threads/forks.h"

namespace baton::nccl {

// A NIC, or the host's network where there is no RDMA: what NCCL calls a device. All doors number
// them alike.
struct Device {
  std::string name;      // "mlx5_0:1", "eth0"
  std::string pci_path;  // in /sys; "": none
  uint64_t guid = 0;
  int speed = 10'000;  // Mb/s
  int port = 0;
  bool rdma = false;
};
// The devices of this machine, sorted by PCI address: RDMA adapters if there are any and they are
// wanted, else one device for the network, named by its interface ("": the first). sysfs is mounted
// at `root`.
std::vector<Device> find_devices(const std::string& root, std::string_view wanted, bool rdma,
                                 const std::string& interface);

// Settings from the environment: variables that users of NCCL know, and Baton's own.
struct PluginSettings {
  std::vector<std::string> providers;  // BATON_NCCL_PROVIDERS; empty: all there are
  SettingValues values;                // BATON_NCCL_SET, then what NCCL_* variables stand for
  std::string adapters;                // NCCL_IB_HCA
  std::string interface;               // the first that NCCL_SOCKET_IFNAME leaves
  std::string advertise;               // addresses of those; "": all of this machine
  bool rdma = true;                    // NCCL_IB_DISABLE
  // NotFound: NCCL_SOCKET_IFNAME names no interface that has an address. InvalidArgument: a value.
  static absl::StatusOr<PluginSettings> from_environment();
};

class Plugin {
 public:
  // The process's. Its workers end when the process exits.
  static Plugin& get();

  // Once for each communicator (before v11: once for all). The first reads the environment, finds
  // the devices, and says what was chosen in a line of NCCL_DEBUG=INFO. Not OK: NCCL takes another
  // network. `traffic_class`: -1: none; the first one counts.
  absl::Status open(Logger log, int traffic_class = -1);

  // After open(). Empty before.
  const std::vector<Device>& devices() const { return devices_; }
  // Makes the device's worker when it is first used. InvalidArgument: there is no such device.
  // FailedPrecondition: this process was forked from the one that opened the plugin.
  absl::StatusOr<Hub*> hub(int device) { return hub(device, kListens); }
  // The options of the device's workers, for an interface that makes its own. Errors as of hub().
  absl::StatusOr<WorkerOptions> worker_options(int device);
  // For calls of this process to itself: a second worker, for none calls itself.
  absl::StatusOr<Hub*> calling_hub(int device) { return hub(device, kCallsItself); }

  // FailedPrecondition: this process was forked from the one that opened the plugin.
  absl::Status of_this_process() const;

  // A line of NCCL's log. Before NCCL has given its logger: of Baton's.
  void say(LogLevel level, const std::string& text) const;
  void set_logger(Logger log) {
    if (log != nullptr) log_.store(log, std::memory_order_release);
  }

  // For tests, before open(): where workers come from (sim, a fake of verbs), and whether threads
  // drive them.
  enum Role : uint8_t { kListens, kCallsItself };
  using MakeWorker =
      std::function<absl::StatusOr<std::unique_ptr<Worker>>(WorkerOptions options, Role role)>;
  void make_workers_by(MakeWorker make, bool threads);
  // For tests, when all comms are closed: ends the workers, and forgets what open() has found.
  void reset();

 private:
  absl::Status check(int device) const;  // under the lock
  WorkerOptions options_for(const Device& device) const;
  absl::StatusOr<Hub*> hub(int device, Role role);
  absl::StatusOr<std::unique_ptr<Hub>> make_hub(const Device& device, Role role);

  std::atomic<Logger> log_{nullptr};
  std::mutex mutex_;
  bool opened_ = false;
  absl::Status status_;
  const base::MadeHere made_here_;
  MakeWorker make_;
  bool threads_ = true;
  PluginSettings settings_;
  std::vector<Device> devices_;
  std::vector<std::array<std::unique_ptr<Hub>, 2>> hubs_;  // of each device, by role
};

// NCCL's word for it.
Result result_of(const absl::Status& status);
// The same, and a line of the log that says what failed: "connect: ..., do ...".
Result fail(const std::string& what, const absl::Status& status);

}  // namespace baton::nccl
