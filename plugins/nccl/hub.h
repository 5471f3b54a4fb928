// A hub: one worker, the peers that it talks to, and pool memory of it. All comms of a device, of
// every door, share one.
//
// Threads: every function may be called from any thread. poll() never waits; it moves bytes unless
// another thread does, and hands on what peers have said every now and then.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/endpoint.h"
#include "transport/pool.h"
#include "transport/progress_thread.h"
#include "transport/worker.h"

namespace baton::nccl {

// A connection to another hub. Lives as long as the hub. Two hubs may have two of them: each has
// called the other.
struct HubPeer {
  PeerId id;
  WorkerUid uid;
  std::atomic<bool> up{false};
  std::atomic<bool> down{false};
};

// The part of the plugin that a message is for: its first byte.
enum class Door : char { kNet = 'n', kRma = 'r' };

// The transfers that a closed comm left under way. Destroyed when they have ended.
class Remains {
 public:
  virtual ~Remains() = default;
  virtual bool over() = 0;
};

class Hub {
 public:
  // `threads`: a thread drives the worker while no caller does, and one hands on what came.
  static absl::StatusOr<std::unique_ptr<Hub>> create(std::unique_ptr<Worker> worker, bool threads);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  Worker& worker() { return *worker_; }
  const Handle& handle() const { return handle_; }  // how others reach it

  // The connection to the hub behind a handle; starts one if there is none. `up` and `down` tell
  // its state. After a connection went down the next call starts another.
  absl::StatusOr<HubPeer*> call(const Handle& handle);
  // Unavailable, and why: it is down. OK: it is not.
  absl::Status status(const HubPeer& peer) const;

  // Messages are delivered once, in no order with transfers.
  absl::Status tell(const HubPeer& peer, Door door, std::string_view message);
  // Called by listen() and poll(), one at a time, without a lock that functions of the hub take.
  // Before the first of them.
  using OnMessage = std::function<void(HubPeer& from, std::string_view message)>;
  void on_message(Door door, OnMessage call) { doors_[door] = std::move(call); }

  // Moves bytes, and every now and then hands on what came. Cheap enough for test().
  bool poll();
  // Moves bytes and hands on what came: for connect() and accept().
  void listen();

  // Memory of a pool: peers on this machine map it.
  absl::StatusOr<Block> allocate(size_t bytes);
  void free(const Block& block);
  // A second registration of a block's region, under another key: deregistering it fences only the
  // peers that got that key.
  absl::StatusOr<MemoryRegion> register_again(const Block& block);

  // Keeps it until it is over.
  void leave(std::unique_ptr<Remains> remains);
  // Polls until over() is true. False: it was not within `longest` of real time.
  bool settle(const std::function<bool()>& over, std::chrono::milliseconds longest);

 private:
  explicit Hub(std::unique_ptr<Worker> worker)
      : worker_(std::move(worker)), handle_(Handle::of(*worker_)) {}
  void drain();
  void watch();
  HubPeer* peer_of(PeerId id, const WorkerUid* uid);

  const std::unique_ptr<Worker> worker_;
  const Handle handle_;
  std::map<Door, OnMessage> doors_;
  std::mutex mutex_;  // guards what follows
  std::unique_ptr<MemoryPool> pool_;
  std::vector<std::unique_ptr<HubPeer>> peers_;
  std::map<std::pair<uint32_t, uint32_t>, HubPeer*> by_id_;
  std::map<std::array<uint8_t, 16>, HubPeer*> called_;
  std::vector<std::unique_ptr<Remains>> remains_;
  std::mutex draining_;  // held while what came is handed on
  Notification notification_;
  std::atomic<uint32_t> polls_{0};
  std::unique_ptr<ProgressThread> thread_;
  std::mutex stop_mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread watcher_;
};

}  // namespace baton::nccl
