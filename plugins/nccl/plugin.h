// What the plugin has once in a process, whichever of its doors NCCL opens: NCCL's logger, settings
// from the environment, and the devices, each with a hub (hub.h) that all of its comms share.
//
// Threads: every function may be called from any thread. Nothing here throws, and what NCCL is told
// is a Result; the reason is one line of NCCL's log (fail()).
#pragma once

#include <atomic>
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
// Those of this machine, sorted by PCI address: RDMA adapters where there are some and they are
// wanted, else one for the network. `root`: where sysfs is.
std::vector<Device> find_devices(const std::string& root, std::string_view wanted, bool rdma);

// What the environment says: variables that users of NCCL know, and Baton's own.
struct PluginSettings {
  std::vector<std::string> providers;  // BATON_NCCL_PROVIDERS; empty: all there are
  SettingValues values;                // BATON_NCCL_SET, and what NCCL_* variables stand for
  std::string adapters;                // NCCL_IB_HCA
  std::string listen_host = "*";       // by NCCL_SOCKET_IFNAME
  bool rdma = true;                    // NCCL_IB_DISABLE
  // NotFound: NCCL_SOCKET_IFNAME names no interface with an address. InvalidArgument: a value.
  static absl::StatusOr<PluginSettings> from_environment();
};

class Plugin {
 public:
  // The process's. Made by the first call; ends its workers when the process exits. In a forked
  // child it makes nothing and every call fails.
  static Plugin& get();

  // Once for each communicator (or once for all, before v11): the first reads the environment and
  // finds the devices; says what was chosen in a line of NCCL_DEBUG=INFO. Not OK: NCCL takes
  // another network, and the log says why.
  absl::Status open(Logger log);
  void close() {}  // workers stay: the next communicator uses them

  // After open().
  const std::vector<Device>& devices() const { return devices_; }
  // InvalidArgument: there is no such device. Makes the worker of the device at its first use.
  absl::StatusOr<Hub*> hub(int device);
  // For calls of a process to itself: a second worker, for none calls itself.
  absl::StatusOr<Hub*> calling_hub(int device);

  // For tests: workers from elsewhere (sim, a fake of verbs), of a device and for listening (0) or
  // for calling this process itself (1). Before open().
  using MakeWorker =
      std::function<absl::StatusOr<std::unique_ptr<Worker>>(WorkerOptions, int role)>;
  void set_worker_maker(MakeWorker make, bool threads);
  // For tests: as if the process ended.
  void reset();

  // A line of NCCL's log; before NCCL has given its logger, of Baton's.
  void say(LogLevel level, std::string_view text);
  Logger logger() const { return log_.load(std::memory_order_acquire); }
  void set_logger(Logger log) {
    if (log != nullptr) log_.store(log, std::memory_order_release);
  }

 private:
  absl::StatusOr<Hub*> hub(int device, int role);

  std::atomic<Logger> log_{nullptr};
  std::mutex mutex_;
  bool opened_ = false;
  bool threads_ = true;
  MakeWorker make_;
  PluginSettings settings_;
  std::vector<Device> devices_;
  std::vector<std::unique_ptr<Hub>> hubs_;  // two for each device, made when used
};

// NCCL's word for it.
Result result_of(const absl::Status& status);
// The same, and a line of the log that says what failed: "connect: ..., do ...".
Result fail(std::string_view what, const absl::Status& status);

}  // namespace baton::nccl
