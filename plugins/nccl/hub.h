// A hub: one worker, the peers that it talks to, and the memory that is registered with it. All
// comms of a device, of every door, share one.
//
// Threads: every function may be called from any thread. poll() never waits; it moves bytes unless
// another thread does, and hands on what peers have said every now and then.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/endpoint.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::nccl {

// Another hub, as this one knows it. Lives as long as the hub.
struct HubPeer {
  PeerId id;
  WorkerUid uid;
  std::atomic<bool> up{false};
  std::atomic<bool> down{false};
};

// Which door a message is for: its first byte.
enum class Door : char { kNet = 'n', kRma = 'r' };

// What outlives a comm that was closed: transfers that have not ended yet.
class Remains {
 public:
  virtual ~Remains() = default;
  virtual bool over() = 0;  // it may be destroyed
};

class Hub {
 public:
  static absl::StatusOr<std::unique_ptr<Hub>> create(std::unique_ptr<Worker> worker, bool thread);
  ~Hub();

  Worker& worker() { return *worker_; }
  const Handle& handle() const { return handle_; }  // how others reach it

  // The hub behind a handle; called if it is not connected, which takes a while: `up` and `down`
  // say what came of it. After it went down the next call makes another peer.
  absl::StatusOr<HubPeer*> call(const Handle& handle);
  absl::Status why_down(const HubPeer& peer) const { return worker_->peer_status(peer.id); }

  // Messages: delivered once, in no order with transfers.
  absl::Status tell(const HubPeer& peer, Door door, std::string_view message);
  // Called by poll(), one at a time and not under a lock of the hub's. Set once, before the first
  // poll().
  using OnMessage = std::function<void(HubPeer& from, std::string_view message)>;
  void on_message(Door door, OnMessage call);

  // Moves bytes: true if any did, or anything came. Cheap enough to be called from test().
  bool poll();
  // The same, and hands on what came: from connect() and accept().
  void listen();

  // Memory of pools: peers on this machine map it.
  absl::StatusOr<Block> allocate(size_t bytes);
  void free(const Block& block);
  // The block's region under a key of its own: deregistering that fences the peers that have it.
  absl::StatusOr<MemoryRegion> register_again(const Block& block);

  void leave(std::unique_ptr<Remains> remains);
  // Polls until `over` or for about so long, by real time.
  bool settle(const std::function<bool()>& over, Time longest);

 private:
  explicit Hub(std::unique_ptr<Worker> worker) : worker_(std::move(worker)) {}
  void drain();
  HubPeer* peer_at(PeerId id);

  std::unique_ptr<Worker> worker_;
  Handle handle_;
  std::mutex mutex_;  // guards what follows
  std::unique_ptr<MemoryPool> pool_;
  std::vector<std::unique_ptr<HubPeer>> peers_;
  std::map<std::pair<uint32_t, uint32_t>, HubPeer*> by_id_;
  std::map<std::array<uint8_t, 16>, HubPeer*> by_uid_;  // called, and not down
  std::vector<std::unique_ptr<Remains>> remains_;
  std::mutex draining_;  // held while messages are handed on
  std::map<Door, OnMessage> doors_;
  Notification notification_;
  std::atomic<uint32_t> polls_{0};
  std::unique_ptr<ProgressThread> thread_;
};

}  // namespace baton::nccl
