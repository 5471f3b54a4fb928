// One opened RDMA device: its ports and their addresses, the registrations of the worker's regions
// on it, its events.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/region.h"
#include "verbs/device/gid.h"
#include "verbs/device/receive_pool.h"
#include "verbs/device/tuning.h"
#include "verbs/device/verbs_api.h"

namespace baton::verbs {

// Destroys queue pairs that the adapter has let go of, on a thread of its own.
//
// Destroying one may take long: rdma_rxe waits up to 50 seconds for packets that lie in the queue
// of an interface whose link is down. No other thread needs to: a queue pair that has flushed
// touches no memory any more. One that has not is destroyed where it is, for that is its fence.
class QueuePairReaper {
 public:
  QueuePairReaper() = default;
  ~QueuePairReaper();  // waits until all is done
  QueuePairReaper(const QueuePairReaper&) = delete;
  QueuePairReaper& operator=(const QueuePairReaper&) = delete;

  // From the provider's thread. `destroy` runs once, on the other thread, in the order given.
  void reap(std::function<void()> destroy);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<std::function<void()>> waiting_;
  bool ending_ = false;
  std::thread thread_;  // started with the first call
};

class Device;

struct Port {
  Device* device = nullptr;
  uint8_t number = 1;
  uint8_t index = 0;  // among all ports that the provider uses
  ibv_port_attr attributes{};
  std::vector<ibv_gid_entry> gids;

  bool up() const { return attributes.state == IBV_PORT_ACTIVE; }
  bool infiniband() const { return attributes.link_layer == IBV_LINK_LAYER_INFINIBAND; }
  std::string name() const;  // "mlx5_0:1"
  double bytes_per_second() const;
};

// OK if an adapter could reach the region's memory at all; else the reason. Device memory needs a
// dma-buf or nvidia-peermem.
absl::Status reaches_memory(const RegionEntry& region);

class Device {
 public:
  static absl::StatusOr<std::unique_ptr<Device>> open(const VerbsApi& api, ibv_device* device,
                                                      const Tuning& tuning);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }
  const VerbsApi& api() const { return api_; }
  const ibv_device_attr& attributes() const { return attributes_; }
  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }
  ibv_comp_channel* channel() const { return channel_; }
  // The shared receive queue; null if each queue pair has receives of its own.
  ReceivePool* receive_pool() const { return pool_broken_ ? nullptr : receive_pool_.get(); }
  // The shared queue failed: new queue pairs have receives of their own.
  void give_up_receive_pool() { pool_broken_ = true; }
  // NUMA node, Locality::kUnknown where it has none.
  int node() const { return node_; }
  void set_node(int node) { node_ = node; }
  // Destroys the device's queue pairs.
  QueuePairReaper& reaper() { return *reaper_; }
  bool dead() const { return dead_; }
  void set_dead() { dead_ = true; }

  // Reads state and addresses of a port again.
  absl::Status refresh(Port& port) const;

  // The worker's regions, by their index in its table. remove_region() fences: when it has returned
  // the adapter does not touch the memory any more.
  // Memory of a device is registered in one of two ways.
  enum class Way : uint8_t { kDmaBuf, kAddress };
  absl::Status add_region(const RegionEntry& region, Way way = Way::kDmaBuf);
  void remove_region(uint32_t index);
  // Null: never added, as on a device that had died before.
  const ibv_mr* region(uint32_t index) const {
    return index < regions_.size() ? regions_[index] : nullptr;
  }

  // How many regions of each CUDA device are registered in which way.
  std::string about_device_memory() const;

  // OK if memory can be registered through a dma-buf here; else the reason.
  absl::Status dma_buf() const;

  // Call this between a completion and its report: it makes what adapters wrote to device memory
  // visible to the devices. After an error the devices may not see it.
  absl::Status show_devices() const;

  // Memory of our own, for messages.
  absl::StatusOr<ibv_mr*> register_own(void* data, size_t bytes) const;
  // Anybody's, for the caller to deregister; through a dma-buf, where `file` is one.
  absl::StatusOr<ibv_mr*> register_memory(void* data, size_t bytes, int access,
                                          const BackingFile& file = {}) const;
  // True if a self-check (prove_region()) has seen an adapter write to such memory of this device.
  bool proved(int device, Way way) const { return proved_.contains({device, way}); }
  void set_proved(int device, Way way) { proved_.insert({device, way}); }

  // The next event of the device, if there is one. The rest: whom it is about, or null and 0.
  struct Event {
    ibv_event_type type{};
    const ibv_qp* queue_pair = nullptr;
    const ibv_cq* completions = nullptr;
    int port = 0;
  };
  bool next_event(Event& event) const;
  // Takes one completion event off the channel; false when there is none.
  bool next_completion_event() const;

 private:
  Device(const VerbsApi& api, std::string name, const Tuning& tuning)
      : api_(api), name_(std::move(name)), relaxed_(tuning.relaxed_ordering) {}
  absl::Status refusal(size_t bytes, int error, bool dma_buf) const;

  const VerbsApi& api_;
  const std::string name_;
  const bool relaxed_;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  std::unique_ptr<ReceivePool> receive_pool_;
  std::unique_ptr<QueuePairReaper> reaper_ = std::make_unique<QueuePairReaper>();
  ibv_device_attr attributes_{};
  std::vector<ibv_mr*> regions_;
  struct OfDevice {
    int device = -1;  // of CUDA
    Way way = Way::kDmaBuf;
  };
  std::map<uint32_t, OfDevice> on_devices_;  // by region
  std::set<std::pair<int, Way>> proved_;
  size_t pinned_bytes_ = 0;  // of the worker's regions
  int pinned_regions_ = 0;
  std::vector<int> late_;  // devices with regions here that see writes when they were flushed
  int node_ = -1;
  bool dead_ = false;
  bool pool_broken_ = false;
};

// The devices and ports that `tuning` selects, or all active ones; if there are none, the reason.
struct Devices {
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Port>> ports;
  std::string notes;  // about those that were left out
};
absl::StatusOr<Devices> open_devices(const VerbsApi& api, const Tuning& tuning);

// Checks that an adapter moves the bytes of the device memory that it has registered: some pairs of
// adapter and GPU register memory and then fail, or reach other bytes. A queue pair that is
// connected to itself finds out before a caller relies on the registration.

// A few bytes at both ends of the region as the adapter reads them, beside what the device says is
// there; nothing of it is written. And once for each device and way: bytes that the adapter writes
// to memory of ours there. `port` is up. The region is registered there in that way; the reason
// why it must not be used.
absl::Status prove_region(Port& port, const Tuning& tuning, const RegionEntry& region,
                          Device::Way way);

}  // namespace baton::verbs
