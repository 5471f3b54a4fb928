// The inside of a worker. Everything here runs under `mutex`, except what is marked lock-free.
// Split by subject: worker.cc (the public calls), worker_progress.cc (start, progress, sleeping),
// worker_peers.cc (routes, connecting, peers going down), worker_sessions.cc (rails that were lost,
// and peers that are called again), worker_transfers.cc (slices, ends).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/internal/arrivals.h"
#include "transport/internal/bell.h"
#include "transport/internal/control_message.h"
#include "transport/internal/transfer_slots.h"
#include "transport/worker.h"

namespace baton {
namespace internal {

// A first-in first-out list of slots, linked through the slots themselves.
struct SlotQueue {
  uint32_t head = TransferSlot::kNone;
  uint32_t tail = TransferSlot::kNone;
};

// What one peer may have waiting in an inbox: each notification counts its bytes and what keeping
// it costs. Its sender holds the next one back until the application has read some.
inline constexpr uint64_t kNotificationWindow = 4 << 20;
inline constexpr uint64_t kNotificationCost = 64;

struct RailState {
  std::unique_ptr<Rail> rail;
  uint64_t link = 0;  // HelloInfo::link
  uint64_t outstanding_bytes = 0;
  uint32_t outstanding = 0;
  uint32_t moved = 0;  // slices that it gave back for others to do
  bool full = false;   // refused a slice; cleared by its next report
};

// A rail that was lost while slices of ours were on it. They go on when the peer has said which of
// them had landed, and that no byte of the others will.
struct LostRail {
  explicit LostRail(uint64_t number) : link(number) {}

  uint64_t link = 0;
  std::vector<SliceName> unsettled;
  bool gone = false;       // it has reported all that it had
  Time asked_at = kNever;  // the peer has been asked
};

// How a peer of which all rails were lost is called again.
struct Redial {
  Time give_up_at = kNever;  // kNever: it answered since it was lost last
  Time call_at = kNever;
  Time pause{};          // before the call after that
  bool calling = false;  // a call is under way
  bool nobody = false;   // somewhere nobody lives at its address any more
};

struct Peer {
  uint32_t index = 0;
  uint32_t generation = 0;
  PeerState state = PeerState::kConnecting;
  absl::Status why;
  std::string name;
  WorkerUid uid;
  bool uid_known = false;
  uint64_t session = 0;
  std::vector<RailState> rails;
  // Transfers with slices to post. Small ones and messages overtake bulk: control never waits
  // behind it.
  SlotQueue urgent;
  SlotQueue bulk;
  SlotQueue held;  // transfers whose notification waits for credit
  Arrivals arrivals;

  bool dialled = false;  // we called it first
  std::vector<LostRail> lost_rails;
  std::vector<uint64_t> fenced;  // links that the peer has given up before they came up here
  std::string goodbye;           // what it said when it closed a rail for good
  Redial redial;

  // Notifications, in bytes as the inbox counts them.
  uint64_t credit = kNotificationWindow;  // we may still send
  uint64_t unread = 0;                    // from the peer, in our inbox
  uint64_t untold = 0;                    // read here, credit not given back yet

  // Connecting: the routes still to try, best first, and what became of the others.
  Address address;
  std::string require;
  std::vector<std::string> untried;
  std::string route;               // the provider that is being tried
  std::vector<std::string> notes;  // "shm: not used because ..."
  std::string rail_lost;           // why the last one was lost, while others carried on

  PeerId id() const { return {index, generation}; }
};

}  // namespace internal

class Worker::Impl final : public EventSink {
 public:
  static constexpr uint32_t kMaxPeers = 1024;

  Impl(WorkerOptions worker_options, ClusterKey cluster_key, WorkerUid uid,
       CounterTable counter_table);
  ~Impl() override;
  absl::Status start();

  // worker_progress.cc
  bool progress();
  absl::Status watch(int fd);
  bool ready_to_sleep();
  bool arm(internal::Sleeper& sleeper);
  void disarm(internal::Sleeper& sleeper);
  void rouse();
  Time next_timer();
  void wake();          // lock-free
  void signal();        // something the application may wait for has happened
  void tell_waiters();  // without the lock: those who leave the driving to a ProgressThread
  void sleep(const internal::Sleeper& sleeper, Time until);
  absl::Status wait_until(const std::function<bool()>& ready, Time timeout);

  // worker_peers.cc
  absl::StatusOr<PeerId> connect(std::string_view target, std::string_view need);
  internal::Peer* find_peer(PeerId id);
  internal::Peer* new_peer();
  void plan_routes(internal::Peer& peer);
  void try_next_route(internal::Peer& peer);
  void set_peer_state(internal::Peer& peer, PeerState state);
  void peer_up(internal::Peer& peer, const HelloInfo& info, std::unique_ptr<Rail> rail);
  void peer_down(internal::Peer& peer, const absl::Status& why);
  void disconnect(internal::Peer& peer, const absl::Status& why);
  void close_rails(internal::Peer& peer, const absl::Status& why);
  std::string explain(const internal::Peer& peer) const;
  void push_event(PeerEvent event);
  bool run_doomed();
  internal::Peer* peer_of(const Rail& rail);
  internal::Peer* session_of(const HelloInfo& info);
  static bool fenced(const internal::Peer& peer, uint64_t link);
  void drop(std::unique_ptr<Rail> rail);
  void refuse(const HelloInfo& info, std::unique_ptr<Rail> rail, const absl::Status& why);

  // worker_sessions.cc
  internal::LostRail& lost_rail(internal::Peer& peer, uint64_t link);
  void unsettled(internal::Peer& peer, uint64_t link, const internal::SliceName& name);
  void settle(const internal::SliceName& name, bool landed);
  void settle_all(internal::Peer& peer, const absl::Status& why);
  void ask_about_lost_rails(internal::Peer& peer);
  void say(internal::Peer& peer, const internal::ControlMessage& message);
  bool say_what_waits();
  void hear(internal::Peer& peer, Rail& rail, std::string_view words);
  void on_fenced(internal::Peer& peer, const internal::ControlMessage& answer);
  bool answer_questions();
  void peer_lost(internal::Peer& peer, const absl::Status& why);
  void peer_resumed(internal::Peer& peer);
  Time answer_due(const internal::Peer& peer) const;
  bool check_answers(Time now);
  bool call_lost_peers(Time now);
  void round_over(internal::Peer& peer);

  // worker_transfers.cc
  absl::StatusOr<TransferId> submit(const TransferRequest& request);  // lock-free
  absl::Status check(const TransferRequest& request) const;           // lock-free
  bool take_submissions();
  bool take_cancels();
  bool expire(Time now);
  void activate(uint32_t index);
  absl::Status admit(internal::TransferSlot& slot, internal::Peer& peer);
  bool pump();
  bool pump(internal::Peer& peer, internal::SlotQueue& queue);
  internal::RailState* pick_rail(internal::Peer& peer, const internal::TransferSlot& slot);
  static internal::RailState* rail_state(internal::Peer& peer, const Rail* rail);
  void stop(uint32_t index, TransferState verdict, absl::Status why);
  void maybe_finish(uint32_t index);
  bool finish_stopped();
  void enqueue(internal::Peer& peer, uint32_t index);
  void dequeue(internal::Peer& peer, uint32_t index);
  internal::SlotQueue& queue_of(internal::Peer& peer, const internal::TransferSlot& slot);
  void push_notification(PeerId peer, std::string_view payload);
  void notification_read(const Notification& notification);
  bool give_credits();
  void take_credit(internal::Peer& peer, uint64_t amount);

  // EventSink
  void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status status) override;
  void arrived(Rail& rail, const Arrival& arrival) override;
  void counters_moved(Rail&) override { signal(); }
  void connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail) override;
  void connect_failed(uint64_t session, absl::Status why) override;
  void accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) override;
  void handshake_refused(std::string_view who, const absl::Status& why) override;
  void rail_down(Rail& rail, absl::Status why) override;
  void resolved(uint64_t session, absl::StatusOr<std::string> encoded) override;

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

  mutable std::mutex mutex;  // the progress lock
  internal::TransferSlots slots;
  std::vector<std::unique_ptr<internal::Peer>> peers;
  // generation << 8 | PeerState + 1, for lock-free checks by submit().
  std::array<std::atomic<uint64_t>, kMaxPeers> peer_words{};
  absl::flat_hash_map<uint64_t, PeerId> sessions;  // ours, by the number we gave out
  uint64_t next_session;  // from anywhere: the other side of a session has numbers of its own
  std::vector<std::unique_ptr<Rail>> graveyard;        // freed once their provider has returned
  std::vector<std::pair<Rail*, absl::Status>> doomed;  // to be closed for misbehaving
  std::vector<std::pair<PeerId, internal::ControlMessage>> questions;  // kFence, to be answered
  bool answering = false;  // a rail that goes down now does so because the peer has lost it
  std::deque<std::pair<PeerId, std::string>> unsaid;  // waits for a slot of its own
  bool unsaid_due = false;                            // some slot may be free
  size_t peers_reconnecting = 0;
  size_t unanswered = 0;                               // questions of ours
  Time patience = std::chrono::seconds(15);            // peer.answer_ms
  Time redial = std::chrono::seconds(5);               // peer.redial_ms
  std::vector<std::pair<Time, TransferId>> deadlines;  // heap, earliest first
  std::vector<uint32_t> stopped;                       // ended, not announced yet
  std::deque<PeerEvent> events;
  std::vector<Notification> inbox;  // ring; strings keep their memory
  size_t inbox_head = 0;
  size_t inbox_count = 0;
  bool credits_due = false;  // some peer has enough `untold`
  WorkerStats stats;
  Time refusals_quiet_until = Time::min();  // one warning a second is enough

  // Sleeping and waking.
  int epoll_fd = -1;                       // the providers' descriptors and the bell
  int outside_fd = -1;                     // the same, and the bell of `outside`: wait_fd()
  internal::Bell bell;                     // rung by wake()
  internal::Sleeper outside;               // whoever sleeps on wait_fd()
  std::vector<internal::Sleeper*> asleep;  // armed: somebody else's progress() must rouse them
  std::vector<std::unique_ptr<internal::Sleeper>> spare_sleepers;
  std::atomic<int> event_fd{-1};
  std::atomic<bool> sleeping{false};
  std::atomic<bool> cancels{false};
  std::atomic<bool> threaded{false};  // a ProgressThread runs this worker
  std::atomic<uint32_t> waiters{0};
  std::mutex wait_mutex;
  std::condition_variable wait_condition;
  std::atomic<uint64_t> submitted{0};
};

}  // namespace baton
