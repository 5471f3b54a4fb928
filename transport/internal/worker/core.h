// The inside of a worker: its parts, wired together.
//
//   Transfers      from submit() to the end
//   Dispatcher     queues by peer; posts slices to rails
//   Sessions       peers come up, are called again when lost, part, and go down
//   LostRails      what had landed of what was on them
//   Routes         how a peer is called; OtherRoutes: better ones, and ways around
//   Inbox          what the application has to read
//   ControlOutbox  what the worker itself has to tell its peers
//   ClosingRails   closed or freed once their provider has returned
//   Wakeups        how threads sleep
//   Staging        transfers of device memory through pinned rings
//
// All of it runs under `mutex`, except what is marked lock-free. A round of progress costs what
// there is to do, not how many peers there are: those with something to do are on lists.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transport/base/threads/forks.h"
#include "transport/internal/worker/control_outbox.h"
#include "transport/internal/worker/dispatcher.h"
#include "transport/internal/worker/inbox.h"
#include "transport/internal/worker/lost_rails.h"
#include "transport/internal/worker/other_routes.h"
#include "transport/internal/worker/progress_lock.h"
#include "transport/internal/worker/routes.h"
#include "transport/internal/worker/sessions.h"
#include "transport/internal/worker/transfers.h"
#include "transport/internal/worker/wakeups.h"

namespace baton::internal {
struct Examined;
class Staging;

class WorkerCore : public EventSink {
 public:
  // A forked child has a copy of the worker: its sockets, shared memory and sessions are the
  // parent's, and the copy must not use or end them.
  bool of_parent() const { return made_here.elsewhere(); }
  absl::Status usable() const;  // InvalidArgument where it is the parent's

  WorkerCore(WorkerOptions worker_options, ClusterKey cluster_key, WorkerUid uid,
             CounterTable counter_table);
  ~WorkerCore() override;
  absl::Status start();

  bool progress();
  bool ready_to_sleep();
  bool arm(Bell& own);
  // Returns at once if another thread has the lock. `wait_for_thread`: waits for a ProgressThread.
  bool help(bool wait_for_thread = false);
  bool polls() const;          // something is under way that ends without a word
  bool want_to_help();         // lock-free; whether it is a ProgressThread that drives
  bool helped_lately() const;  // lock-free
  void recall();               // takes the lock: a thread that stands back is to drive again, now
  Time next_timer();
  absl::Status wait_until(const std::function<bool()>& ready, Time timeout);

  Peer* find_peer(PeerId id) { return peers.find(id); }
  void withdraw(TransferId id);
  // `missing`: why it has no dma-buf, and no ring.
  absl::Status add_region(RegionEntry& row, std::initializer_list<absl::Status> missing);

  // memory.cc
  absl::StatusOr<MemoryRegion> register_examined(void* data, size_t size, Access access,
                                                 const Examined& memory,
                                                 const absl::Status& no_ring);
  bool wants_ring(const RegionEntry& row) const;  // lock-free
  absl::Status make_ring(int device);             // without the lock: it blocks
  Staging& staging_for_device_memory();

  absl::StatusOr<RemoteView> view(const Peer& peer, const RemoteRegion& region) const;
  absl::StatusOr<RegionEntry*> unused_region(const MemoryRegion& region);  // that may be removed

  // EventSink
  void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status status) override {
    dispatcher.slice_done(rail, transfer, slice, std::move(status));
  }
  void arrived(Rail& rail, const Arrival& arrival) override;
  void counters_moved(Rail&) override { wakeups.signal(); }
  void connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    sessions.connected(session, info, std::move(rail));
  }
  void connect_failed(uint64_t session, absl::Status why) override {
    routes.connect_failed(session, why);
  }
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) override {
    sessions.accepted(info, std::move(rail));
  }
  void handshake_refused(std::string_view caller, const absl::Status& why) override {
    sessions.handshake_refused(caller, why);
  }
  void rail_down(Rail& rail, absl::Status why) override {
    sessions.rail_down(rail, std::move(why));
  }
  void resolved(uint64_t session, absl::StatusOr<std::string> encoded,
                std::string_view at) override {
    routes.resolved(session, std::move(encoded), at);
  }

  WorkerOptions options;
  const ClusterKey key;
  const Clock& clock;
  HelloInfo self;
  RegionTable regions;
  CounterTable counters;
  std::unique_ptr<ProviderContext> context;
  std::vector<std::unique_ptr<Provider>> providers;
  std::string address;
  uint16_t port = 0;

  mutable ProgressLock mutex;
  TransferSlots slots;
  PeerTable peers;
  std::unique_ptr<Staging> staging;  // null: nothing here has to do with memory of devices
  size_t ring_bytes = 64 << 20;      // staging.ring_mib
  bool ring_kernels = true;          // staging.kernels
  WorkerStats stats;

  Wakeups wakeups{clock};
  ClosingRails closing{peers, *this};
  ControlOutbox outbox{*this};
  Inbox inbox{*this};
  Dispatcher dispatcher{*this};
  Transfers transfers{*this};
  LostRails lost_rails{*this};
  Routes routes{*this};
  OtherRoutes other_routes{*this};
  Sessions sessions{*this};
  std::atomic<bool> threaded{false};  // a ProgressThread runs this worker
  Bell* thread_bell = nullptr;        // the one that it sleeps with, while it is there
  static constexpr Time kLongAgo = std::chrono::seconds(-1);
  std::atomic<bool> on_devices{false};  // help() found only copies of devices under way
  Time helped_at = kLongAgo;            // when the last help() ended
  // The same for a help() soon after another; kNever while one is under way.
  std::atomic<Time> helped_often_at{kLongAgo};
  std::atomic<Time> tried_at{kLongAgo};  // when the last help() met another that was at it
  const base::MadeHere made_here;
};

}  // namespace baton::internal

namespace baton {
class Worker::Impl final : public internal::WorkerCore {
  using WorkerCore::WorkerCore;
};
}  // namespace baton
