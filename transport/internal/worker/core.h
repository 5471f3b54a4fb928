// The inside of a worker. Everything here runs under `mutex`, except what is marked lock-free.
// Split by subject: worker.cc (the public calls), worker_progress.cc (start, progress, sleeping),
// worker_routes.cc (calling peers), worker_peers.cc (peers that come and go), worker_sessions.cc
// (rails that were lost, and peers that are called again), worker_failback.cc (other routes than
// those in use), worker_partings.cc (peers that are disconnected), worker_transfers.cc (transfers
// as they begin), worker_slices.cc (queues and rails), worker_ends.cc (how transfers end),
// worker_inbox.cc (what arrives, and credits for it).
//
// A round of progress costs what there is to do, not how many peers there are: those with something
// to do are on lists.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/base/threads/forks.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/stream_order.h"
#include "transport/internal/tables/peer.h"
#include "transport/internal/tables/peer_table.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/internal/threads/bell.h"
#include "transport/internal/threads/progress_lock.h"
#include "transport/internal/worker/closing_rails.h"
#include "transport/internal/worker/control_outbox.h"
#include "transport/internal/worker/dispatcher.h"
#include "transport/internal/worker/inbox.h"
#include "transport/internal/worker/transfers.h"
#include "transport/internal/worker/wakeups.h"
#include "transport/worker.h"

namespace baton::internal {
struct Examined;
class Staging;

// For heaps whose top is the earliest.
inline constexpr auto kLater = [](const auto& a, const auto& b) { return a.first > b.first; };

class WorkerCore : public EventSink {
 public:
  // A forked child has a copy of the worker: its sockets, shared memory and sessions are the
  // parent's, and the copy must not use or end them.
  bool of_parent() const { return made_here.elsewhere(); }
  absl::Status usable() const;  // InvalidArgument where it is the parent's

  static constexpr uint32_t kNone = TransferSlot::kNone;  // where a queue of slots ends

  WorkerCore(WorkerOptions worker_options, ClusterKey cluster_key, WorkerUid uid,
             CounterTable counter_table);
  ~WorkerCore() override;
  absl::Status start();

  // worker_progress.cc
  bool progress();
  bool ready_to_sleep();
  bool arm(Bell& own);
  // Takes the lock, if nobody has it, or, `wait_for_thread`, nobody but a ProgressThread.
  bool help(bool wait_for_thread = false);
  bool polls() const;          // something is under way that ends without a word
  bool want_to_help();         // lock-free; whether it is a ProgressThread that drives
  bool helped_lately() const;  // lock-free
  void recall();               // takes the lock: a thread that stands back is to drive again, now
  Time next_timer();
  absl::Status wait_until(const std::function<bool()>& ready, Time timeout);

  // worker_routes.cc
  static bool is_address(std::string_view target);                          // and not host:port
  absl::StatusOr<std::string> look_up(const std::string& host_port) const;  // lock-free; may block
  // `found`: what look_up() said of host:port.
  absl::StatusOr<PeerId> connect(std::string_view target, const std::string& found,
                                 std::string_view need);
  std::vector<std::pair<int, std::string>> rank_routes(const Peer& peer, const std::string& require,
                                                       std::vector<std::string>& notes) const;
  void plan_routes(Peer& peer);
  void note_called(const Peer& peer, const std::string& at);
  std::string called_at(const Peer& peer, std::string_view provider) const;
  void dial(Peer& peer, const std::string& by, Resume resume);
  void try_next_route(Peer& peer);

  // worker_peers.cc
  Peer* find_peer(PeerId id) { return peers.find(id); }
  void peer_up(Peer& peer, const HelloInfo& info, std::unique_ptr<Rail> rail);
  void peer_down(Peer& peer, const absl::Status& why);
  void disconnect(Peer& peer, const absl::Status& why);
  void close_rails(Peer& peer, const absl::Status& why);
  std::string explain(const Peer& peer) const;
  Peer* add_peer();
  // `missing`: why it has no dma-buf, and no ring.
  absl::Status add_region(RegionEntry& row, std::initializer_list<absl::Status> missing);
  static bool fenced(const Peer& peer, uint64_t link);
  void refuse(const HelloInfo& info, std::unique_ptr<Rail> rail, const absl::Status& why);

  // worker_sessions.cc
  LostRail& lost_rail(Peer& peer, uint64_t link);
  void unsettled(Peer& peer, uint64_t link, const SliceName& name,
                 const std::optional<Ordinal>& number);
  void settle(const SliceName& name, Fate fate);
  static void note_counted(Peer& peer, uint64_t link, const Rail& rail);
  static Fate fate_of(const Peer& peer, uint64_t link, const SliceName& name);
  void settle_all(Peer& peer, const absl::Status& why);
  void ask_about_lost_rails(Peer& peer);
  void ask_again(Peer& peer);
  static LostRail* asked_by(Peer& peer, const TransferSlot& slot);
  void hear(Peer& peer, Rail& rail, std::string_view words);
  void on_fenced(Peer& peer, const ControlMessage& answer);
  void look_for_asked_rails();
  bool answer_questions();
  void peer_lost(Peer& peer, const absl::Status& why);
  void peer_resumed(Peer& peer);
  Time due(const Peer& peer) const;
  void set_timer(Peer& peer);
  bool tend_peers(Time now);
  void check_answers(Peer& peer, Time now);
  void call_again(Peer& peer, Time now);
  void round_over(Peer& peer);

  // worker_partings.cc
  std::shared_ptr<absl::Status> begin_disconnect(Peer& peer, Time timeout);
  void begin_parting(Peer& peer, Time timeout, const absl::Status& why);
  void part_asked(Peer& peer);
  bool tend_partings();
  bool settle_partings();
  void give_up_parting(Peer& peer);
  void note_parted(Peer& peer, const absl::Status& why);

  // worker_failback.cc
  int rank_of(const Rail& rail) const;
  void add_rail(Peer& peer, RailState state);
  std::vector<std::string> better_routes(const Peer& peer) const;
  void look_for_better(Peer& peer);
  void call_better_later(Peer& peer);
  void call_better(Peer& peer);
  void better_failed(Peer& peer, const absl::Status& why);

  void stand_aside(Peer& peer, uint32_t index);
  bool stands_aside(TransferId id);
  void call_around(Peer& peer);
  void around_failed(Peer& peer, const absl::Status& why);
  void give_up_around(Peer& peer);
  void come_around(Peer& peer);
  void around_lost(Peer& peer, const Rail& rail);

  // worker_transfers.cc

  // staging.cc
  absl::StatusOr<MemoryRegion> register_examined(void* data, size_t size, Access access,
                                                 const Examined& memory,
                                                 const absl::Status& no_ring);
  bool wants_ring(const RegionEntry& row) const;  // lock-free
  absl::Status make_ring(int device);             // without the lock: it blocks
  Staging& staging_for_device_memory();

  // worker_slices.cc
  absl::StatusOr<RemoteView> view(const Peer& peer, const RemoteRegion& region) const;

  // worker_ends.cc

  // EventSink
  void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status status) override {
    dispatcher.slice_done(rail, transfer, slice, std::move(status));
  }
  void arrived(Rail& rail, const Arrival& arrival) override;
  void counters_moved(Rail&) override { wakeups.signal(); }
  void connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail) override;
  void connect_failed(uint64_t session, absl::Status why) override;
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) override;
  void handshake_refused(std::string_view who, const absl::Status& why) override;
  void rail_down(Rail& rail, absl::Status why) override;
  void resolved(uint64_t session, absl::StatusOr<std::string> encoded,
                std::string_view at) override;

  WorkerOptions options;
  const ClusterKey key;
  const Clock& clock;
  HelloInfo self;
  RegionTable regions;
  CounterTable counters;
  std::unique_ptr<ProviderContext> context;
  std::vector<std::unique_ptr<Provider>> providers;
  std::vector<std::string> provider_notes;  // why others are missing
  std::string address;
  uint16_t port = 0;

  mutable ProgressLock mutex;
  TransferSlots slots;
  PeerTable peers;
  std::vector<std::pair<Time, PeerId>> peer_timers;  // heap, earliest first; some are out of date
  absl::flat_hash_map<uint64_t, PeerId> sessions;    // ours, by the number we gave out
  struct Called {
    std::string provider;  // whose peer
    std::string at;        // answered there
  };
  std::map<std::array<uint8_t, 16>, Called> called;  // workers that were asked for their address
  uint64_t next_session;        // from anywhere: the other side of a session has numbers of its own
  std::vector<PeerId> parting;  // that one side has asked to part with
  std::vector<std::pair<PeerId, ControlMessage>> questions;  // kFence, to be answered
  bool answering = false;  // a rail that goes down now does so because the peer has lost it
  Time patience = std::chrono::seconds(15);  // peer.answer_ms
  Time redial = std::chrono::seconds(15);    // peer.redial_ms
  Time failback = std::chrono::seconds(1);   // peer.failback_ms
  std::unique_ptr<Staging> staging;          // null: nothing here has to do with memory of devices
  size_t ring_bytes = 64 << 20;              // staging.ring_mib
  bool ring_kernels = true;                  // staging.kernels
  WorkerStats stats;
  Time refusals_quiet_until = Time::min();  // one warning a second is enough

  Wakeups wakeups{clock};
  ClosingRails closing{peers, *this};
  ControlOutbox outbox{{slots, peers, wakeups}};
  Dispatcher dispatcher{{clock, regions, slots, peers, stats, *this, transfers, *this, staging}};
  Transfers transfers{{clock, mutex, regions, slots, peers, stats, *this, wakeups, outbox,
                       dispatcher, *this, staging}};
  Inbox inbox{{peers, wakeups, outbox, closing}};
  std::atomic<bool> threaded{false};  // a ProgressThread runs this worker
  Bell* thread_bell = nullptr;        // the one that it sleeps with, while it is there
  static constexpr Time kLongAgo = std::chrono::seconds(-1);
  std::atomic<bool> on_devices{false};  // help() found only copies of devices under way
  Time helped_at = kLongAgo;            // when the last help() ended
  // Likewise of those that came soon after another; kNever while one is under way.
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
