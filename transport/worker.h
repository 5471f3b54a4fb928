// The worker: one thread's world of regions, peers and transfers.
//
//   auto worker = Worker::create({.name = "prefill-0"});
//   auto pool   = MemoryPool::create(**worker);
//   auto peer   = (*worker)->connect(address_of_the_other_side);
//   auto id     = (*worker)->submit({.op = Op::kWrite, .peer = *peer, ...});
//   absl::Status status = (*worker)->wait(*id);
//
// progress() advances everything and never blocks. Call it from your own loop, sleep on wait_fd()
// between calls, or let a ProgressThread run it. submit(), cancel(), state() and Counter reads may
// be called from any thread and wait for no lock; the rest may be called from any thread and takes
// the progress lock for a moment.
//
// Forks: fork() waits, for a second at most, for who makes or ends a worker and for the progress
// locks of all of them. A forked child makes workers of its own: those of its parent, and their
// threads and pools, begin nothing there (InvalidArgument), move nothing, and may be destroyed.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/address.h"
#include "transport/clock.h"
#include "transport/counter.h"
#include "transport/decorators.h"
#include "transport/identity.h"
#include "transport/pool.h"
#include "transport/provider.h"
#include "transport/region.h"
#include "transport/settings.h"
#include "transport/transfer.h"

namespace baton {

struct WorkerOptions {
  std::string name = "worker";  // told to peers, for messages; at most kMaxWorkerName bytes
  // By name; empty: all that are registered, but for those that are there on request only (ucx,
  // which can end its process): named here, in `require`, or by one of their settings.
  std::vector<std::string> providers;
  std::string require;            // only this provider may be used: no silent fallback
  std::optional<ClusterKey> key;  // default: ClusterKey::for_this_user()
  // The address to listen on. "": loopback only; "*": every interface, by IPv4 and IPv6; "0.0.0.0":
  // every interface, by IPv4 alone; or an address of this machine, or a name that has one, without
  // a port. create() fails if the worker cannot listen there: InvalidArgument, NotFound (no such
  // host), AlreadyExists (the port is in use), PermissionDenied, or Unavailable if no provider
  // listens.
  std::string listen_host;
  uint16_t listen_port = 0;  // what tcp listens on; 0: any free port
  // The addresses that peers get instead of those of this machine's interfaces, if they reach it by
  // others (NAT, a published port): "host" or "host:port", separated by commas; names are looked up
  // once. The port leads to listen_port; a host alone has the ports that are listened on. "": the
  // variable BATON_ADVERTISE, unless the worker listens on loopback only. Peers that call the
  // worker by host:port do not need this: they remember the address that answered.
  std::string advertise;
  const Clock* clock = nullptr;    // default: Clock::steady()
  std::optional<LinkShape> shape;  // wrap every provider in shaped()
  Timeline* timeline = nullptr;    // wrap every provider in traced()
  // Slots: submitted and not yet released. One peer's open transfers have half of them at most, and
  // a third where they carry notifications; less when less than half is free (submit()).
  uint32_t max_transfers = 4096;
  // {"tcp.sockets", "4"}: docs/settings.md has them all. create() refuses others and wrong values.
  SettingValues settings;
  // Providers made by the caller (sim), besides the registered ones.
  std::vector<ProviderFactory> extra_providers;
};

// kReconnecting: every path to it was lost, and it is called again, by all providers that reach it,
// for peer.redial_ms. Open transfers and new ones wait; what had landed is not sent twice. It is
// down when that time is over, when no worker lives at its address any more, or when it says
// goodbye.
enum class PeerState : uint8_t { kConnecting, kUp, kReconnecting, kDown };

struct PeerEvent {
  enum class Kind : uint8_t { kUp, kLost, kResumed, kDown };  // kLost: it is being reconnected
  Kind kind = Kind::kUp;
  PeerId peer;
  std::string name;
  absl::Status why;  // of a kLost and a kDown
  WorkerUid uid;     // of the peer; zeros where it never told
  // The number of earlier events of this peer that were dropped because no caller read them. The
  // count of a peer that the worker forgot is lost (it forgets a peer after 1,024 others went down
  // or had their notifications read); a peer with unread notifications is not forgotten.
  uint32_t missed = 0;
};

struct Notification {
  PeerId peer;
  std::string payload;
};

struct WorkerStats {
  uint64_t registrations = 0;  // regions ever registered
  uint64_t transfers_submitted = 0;
  uint64_t transfers_ended = 0;
  uint64_t bytes_moved = 0;  // of transfers that ended as done
  uint64_t slices_posted = 0;
  uint64_t slices_moved = 0;        // given to another rail after theirs failed
  uint64_t receipts = 0;            // had landed though theirs failed: not sent again
  uint64_t rails_lost = 0;          // while others carried on
  uint64_t peers_lost = 0;          // all of a peer's rails at once
  uint64_t peers_resumed = 0;       // of them, back again
  uint64_t handshakes_refused = 0;  // callers that did not prove themselves, or found no room
  uint64_t open_transfers = 0;      // submitted, not ended
  uint64_t peers_up = 0;
  uint64_t notifications_waiting = 0;
  uint64_t staged_transfers = 0;  // of memory of devices, through pinned memory of the host
  uint64_t staged_bytes = 0;      // copied between it and devices, also for peers
};

class Worker {
 public:
  static absl::StatusOr<std::unique_ptr<Worker>> create(WorkerOptions options);  // listens at once
  // Closes every peer; open transfers end as failed. In a forked child it does nothing.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // --- memory ------------------------------------------------------------------------------
  // Registers [data, data + size) for local use and, per `access`, for peers. The memory stays the
  // caller's and must outlive the registration. InvalidArgument for memory that is not mapped,
  // cannot be read, or cannot be written though peers may write. For pool memory see
  // transport/pool.h.
  // Memory of a CUDA device is recognised (with gpudirect/ linked; MemoryRegion::place says so) and
  // moves over providers that can reach it, which get a dma-buf of it, and over all others through
  // pinned memory of the host (staging.ring_mib for each device); explain() says which. What is to
  // be sent must be there when submit() is called, or TransferRequest::after says which stream
  // still makes it. FailedPrecondition, with each one's reason,
  // where neither can be. InvalidArgument for managed or freed device memory, and for
  // a range over several allocations. Memory that is given with a dma-buf counts as a device's.
  absl::StatusOr<MemoryRegion> register_memory(void* data, size_t size,
                                               Access access = Access::kRemoteReadWrite,
                                               BackingFile file = {});
  // Fences: when it returns OK no peer touches the memory any more, and every RemoteRegion of it is
  // stale. FailedPrecondition while transfers submitted here still use it. Unavailable: the region
  // is gone too, but a peer on this machine stands still in the middle of a copy, and may go on
  // when it is woken: do not use the memory again before that process has ended.
  absl::Status deregister_memory(const MemoryRegion& region);
  // The same up to where it would wait for peers: true, it waits for none any more; false, ask
  // again. Every RemoteRegion is stale from the first time on.
  absl::StatusOr<bool> begin_deregister(const MemoryRegion& region);
  // A peer needs this to reach the region; send it to the peer.
  absl::StatusOr<RemoteRegion> remote_region(const MemoryRegion& region) const;

  // --- counters ----------------------------------------------------------------------------
  absl::StatusOr<CounterId> allocate_counter();      // starts at 0
  absl::Status free_counter(CounterId id);           // late increments change nothing
  uint64_t counter_value(CounterId id) const;        // lock-free, acquire: the bytes are visible
  RemoteCounter remote_counter(CounterId id) const;  // what a peer names to raise it

  // --- peers -------------------------------------------------------------------------------
  // How others reach this worker. Fixed from create() on.
  const std::string& address() const;
  // The port of the listener that host:port users type; 0 if no provider has one.
  uint16_t port() const;

  // Starts connecting to an encoded Address or to "host:port"; returns at once, but for
  // the time it takes to look a name up. Transfers may be
  // submitted to the peer right away. `require` (a provider's name) turns fallback into an error.
  absl::StatusOr<PeerId> connect(std::string_view address, std::string_view require = "");
  // Parts with the peer, and fences: when it returns OK, no byte of any transfer with it moves any
  // more, on either side, whoever submitted it, and all memory of both can be used for something
  // else. Transfers that are open, and those submitted from now on, fail on both sides, each when
  // nothing of it can move any more (until then it is kEnding); the peer hears that it is asked to
  // part, ends its own, and closes the connection. Blocks until then, driving progress as wait()
  // does; safe from several threads, and while the peer does the same. Not from an EndCallback.
  //
  // Not OK, and the connection is closed all the same: DeadlineExceeded, the peer has not
  // answered within `timeout` or peer.answer_ms, whichever is shorter; Unavailable, it was lost and
  // could not be reached again, or is of a release that cannot be asked. Then nothing lands or is
  // read here any more (but for a process of this machine that stands still in the middle of a copy
  // over shm: deregister_memory() knows), while bytes may land at the peer until it hears of the
  // end (its kDown). A timeout of zero waits for nothing: so at once (of a device: when its copy
  // ends). NotFound for a stale id. Of a peer that is down already: how it parted.
  absl::Status disconnect(PeerId peer, Time timeout = kNever);
  // The same, without waiting: progress() does it. Over when peer_state() is kDown; disconnect()
  // then returns at once, and says how.
  void begin_disconnect(PeerId peer, Time timeout = kNever);
  PeerState peer_state(PeerId peer) const;  // where the connection stands
  // Why the peer is down; OK while it is connecting or up.
  absl::Status peer_status(PeerId peer) const;
  // The routes taken, why a rail was lost, and for each provider not used, why: for logs and
  // people.
  std::string explain(PeerId peer) const;
  // The peer's region, mapped, so that it can be read in place: needs a rail that can do that (shm,
  // to pool memory) and the right to read. Unavailable while the connection is still coming up;
  // Unimplemented where no rail can, as over tcp or a shaped link.
  absl::StatusOr<RemoteView> view(PeerId peer, const RemoteRegion& region) const;
  // Peers that came up or went down, oldest first.
  std::optional<PeerEvent> next_peer_event();

  // --- transfers ---------------------------------------------------------------------------
  // Starts a transfer. Lock-free; no heap allocation (unless a notification is longer than
  // kInlineNotification). Invalid requests are refused here: bad layouts, sides of unequal size,
  // out of bounds, missing rights, unknown peer.
  // ResourceExhausted: all slots are in use; or the peer has its share of them, by transfers that
  // have not ended. So one that does not read its notifications, is being called again or is slow
  // leaves others theirs, and its own transfers room beside its notifications. The share is as
  // many as are free, less when less than half is, half of that with notifications; a peer that has
  // none open gets one as long as there is any. The text says who has them. Submit again when some
  // have ended: an EndCallback may.
  // With order to a stream it calls the driver, and what its waits need is made when memory of the
  // device is registered. For a device of which this worker has none, the first such call makes it,
  // and blocks while memory is pinned: make that one outside of callbacks.
  absl::StatusOr<TransferId> submit(const TransferRequest& request);
  // A write without a transfer: where it returns true the bytes are there, and the counter (of
  // generation 0: none) has risen behind them. For few bytes of the host's, of any memory, to what
  // is mapped here (shm). False: submit() it; the bytes may be there. Not from an EndCallback.
  bool write_now(PeerId peer, const void* from, size_t bytes, const RemoteRegion& to, size_t offset,
                 const RemoteCounter& counter, uint64_t increment);
  // A small message without a transfer: same delivery, same end. Release it like a transfer;
  // what notify_detached() sends is released by the worker.
  absl::StatusOr<TransferId> notify(PeerId peer, std::string_view payload);
  absl::Status notify_detached(PeerId peer, std::string_view payload);  // as notify()
  // NotFound for a stale or unknown id.
  absl::StatusOr<TransferState> state(TransferId id) const;
  // OK once done; Unavailable("not ended") while active; otherwise why it ended.
  absl::Status status(TransferId id) const;
  // Asks for the end. The transfer has ended only when state() says so; it may still end as done.
  absl::Status cancel(TransferId id);
  // As cancel(), for memory that cannot wait for the wire: if a connection to the peer still reads
  // or writes the transfer's local memory, the worker closes it like a lost one and redials; the
  // peer's other transfers continue over the remaining or the new connections. When this returns
  // local_free() holds; for device memory it holds when the copies have ended. The peer goes down
  // if peer.redial_ms is 0 and no other connection is left. Not from an EndCallback.
  absl::Status withdraw(TransferId id);
  // Whether the transfer's local memory may be used for something else, or deregistered: it has
  // ended, or it is kEnding and waits for nothing but its target's word, while no byte of that
  // memory is read or written for it any more. Over tcp and ucx that is as soon as it is kEnding;
  // elsewhere when what is under way has completed. NotFound as state().
  absl::StatusOr<bool> local_free(TransferId id) const;
  // A kernel behind TransferRequest::release reads here whether the transfer succeeded. Valid until
  // release(id). FailedPrecondition: no stream waits for the transfer.
  absl::StatusOr<StreamOutcome> outcome(TransferId id) const;
  // Gives the slot back. FailedPrecondition while active.
  absl::Status release(TransferId id);
  // Blocks until the transfer ended, drives progress, releases the slot and returns how it ended.
  // Beside a ProgressThread it drives as long as something happens every 20 us, then the thread
  // does. DeadlineExceeded (and nothing released) when `timeout` ran out first.
  absl::Status wait(TransferId id, Time timeout = kNever);
  // Blocks until `ready()` holds; it is evaluated after each round of progress, on this thread.
  absl::Status wait_until(const std::function<bool()>& ready, Time timeout = kNever);

  // Notifications that arrived, oldest first.
  bool next_notification(Notification& out);  // reuses the memory of `out`

  // --- progress ----------------------------------------------------------------------------
  // Advances everything by a bounded amount; true if anything happened. Waits for nothing. Of the
  // CUDA driver it makes no call that blocks but one: what a peer shares by CUDA IPC is mapped when
  // the first transfer uses it, about a millisecond, once for each of its allocations.
  bool progress();
  // The same, but returns at once if another thread is making progress. For polling loops: a caller
  // that polls has a core and may as well move the bytes. A ProgressThread yields while a caller
  // helps every few microseconds.
  bool help();
  // Readable when progress() has work, or when another thread's progress() did some since arm().
  // Level-triggered; for epoll or poll. Call arm() before sleeping on it, and do not sleep if that
  // returns false. For one sleeper; any number of others may sleep in wait() and wait_until().
  int wait_fd() const;
  bool arm();  // before sleeping on wait_fd(); false: there is work, do not sleep
  // When progress() must be called at the latest, on the worker's clock.
  Time next_timer() const;
  // An eventfd that becomes readable when something happened that the application may wait for: a
  // transfer ended, a notification or peer event came, a counter rose. Read it (8 bytes) to clear
  // it.
  int event_fd() const;
  // Wakes threads that sleep in wait_until() or on wait_fd(), so that they check again, and makes
  // event_fd() readable. Call it after a change outside the worker that they may wait for. Any
  // thread, but not while holding a lock that their ready() takes.
  void wake();

  const Clock& clock() const;  // that of WorkerOptions
  WorkerStats stats() const;   // cheap enough to be read each second

 private:
  friend class ProgressThread;
  class Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton
