// The provider contract: what a way of moving bytes (shm, tcp, verbs, ucx, sim) implements.
//
// A worker owns its providers and calls them from one thread at a time, always under its progress
// lock; a provider owns no threads and takes no locks. The worker cuts transfers into slices, gives
// them to rails, and hears back through the EventSink. It does everything that all providers share:
// queues, striping, failover, deadlines, cancellation, counting of arrivals.
//
// Rules a provider keeps:
//   - progress() never blocks and does a bounded amount of work.
//   - Every slice that post() accepted is reported with slice_done() exactly once. After that
//     report no byte of the slice moves any more, on either side; but for kUnknown.
//   - A rail that was closed here lands nothing more here, and reports nothing more as arrived().
//   - A rail that goes down reports all its slices first, then rail_down().
//   - Nothing from a peer is parsed before the handshake has authenticated it; every remote access
//     goes through RegionTable::resolve() (or an equal check) before a byte moves.
//   - No allocation per slice in the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/clock.h"
#include "transport/counter.h"
#include "transport/identity.h"
#include "transport/region.h"
#include "transport/settings.h"
#include "transport/transfer.h"

namespace baton {

class Rail;

// The part of a transfer that rails read. It lives in the worker's slot and is valid from post() to
// the last slice_done() of that transfer.
struct TransferDescriptor {
  TransferId id;
  Op op = Op::kWrite;
  std::byte* local_base = nullptr;  // of the local region; null for a transfer of zero bytes
  uint32_t local_region = 0;        // its index in the region table
  Layout local;
  RemoteRegion remote;
  Layout remote_layout;
  size_t bytes = 0;  // of the whole transfer
  RemoteCounter counter;
  uint64_t increment = 0;
  bool polled = false;
  std::string_view notify;
};

// Bytes [begin, end) of a transfer, to be moved by one rail. A transfer of zero bytes is one slice
// with begin == end: it carries only a counter increment and a notification.
struct Slice {
  const TransferDescriptor* transfer = nullptr;
  uint32_t index = 0;  // of this slice in its transfer; unique, also when posted again elsewhere
  size_t begin = 0;
  size_t end = 0;
  bool whole() const { return begin == 0 && end == transfer->bytes; }
};

// A target learns this about a slice of a write once the slice's bytes are visible. The worker's
// Arrivals adds the slices of a transfer up and applies counter and notification when the last one
// is there.
struct Arrival {
  TransferId transfer;  // as numbered by the sender
  uint32_t slice = 0;   // Slice::index
  uint64_t slice_bytes = 0;
  uint64_t total_bytes = 0;
  uint32_t counter_index = 0;
  uint16_t counter_generation = 0;  // 0: no counter
  uint64_t increment = 0;
  std::string_view notify;  // carried by the slice that holds the last byte
};

// How a worker hears from its providers. All calls come from inside Provider::progress() or
// Rail::post()/abort()/close().
class EventSink {
 public:
  virtual ~EventSink() = default;

  // A slice is finished. OK: its bytes are visible at their destination. kUnavailable: this rail
  // could not do it, another may. kCancelled: aborted. kUnknown: this rail is being lost, and its
  // bytes may have landed, or may still do so until the peer has closed its end (of a write; the
  // worker asks). Anything else fails the transfer.
  virtual void slice_done(Rail& rail, TransferId transfer, uint32_t slice, absl::Status status) = 0;

  // Target side: the bytes of a slice of a peer's write are visible here.
  virtual void arrived(Rail& rail, const Arrival& arrival) = 0;
  // Target side, for rails whose peers raise our counters themselves: some may have risen.
  virtual void counters_moved(Rail& /*rail*/) {}

  // A rail asked for with Provider::connect() is up (the first of them makes the peer usable), or
  // the attempt has failed for good: kNotFound: no worker lives at the address any more;
  // kPermissionDenied or kFailedPrecondition: the peer refused.
  virtual void connected(uint64_t session, const HelloInfo& peer, std::unique_ptr<Rail> rail) = 0;
  virtual void connect_failed(uint64_t session, absl::Status why) = 0;
  // A peer connected to us, authenticated. Rails of one session of one peer belong together.
  virtual void accepted(const HelloInfo& peer, std::unique_ptr<Rail> rail) = 0;
  // A peer called and was turned away before there was a rail: the wrong key or version
  // (kPermissionDenied, kFailedPrecondition), or no whole handshake at all. `who`: for people.
  virtual void handshake_refused(std::string_view /*who*/, const absl::Status& /*why*/) {}
  // The rail is gone; all its slices have been reported. The sink destroys it soon afterwards.
  // `why` kUnavailable: it was lost, and the peer may be called again. Anything else: the peer said
  // goodbye, or this worker must not talk to it.
  virtual void rail_down(Rail& rail, absl::Status why) = 0;
  // Answer to Provider::query(): the peer's encoded Address, or why there is none. `at`: the
  // address that answered; a peer behind NAT does not know its outer address.
  virtual void resolved(uint64_t session, absl::StatusOr<std::string> address,
                        std::string_view at) = 0;
};

// A peer's region, mapped here: it can be read in place, without a transfer. Nothing guards its
// bytes but what the two sides agree on; the mapping itself stays valid for as long as `keep` is
// held, also after the peer is gone.
struct RemoteView {
  const std::byte* data = nullptr;
  size_t size = 0;
  std::shared_ptr<const void> keep;
};

// One path to one peer. Owned by the worker.
class Rail {
 public:
  struct Properties {
    std::string provider;            // "shm", "tcp", ...
    std::string route;               // for people: "tcp 10.0.0.1:4000 (cubic, 4 sockets)"
    double bytes_per_second = 10e9;  // share of the work this rail gets
    size_t slice_bytes = SIZE_MAX;   // preferred size of a slice
    uint32_t depth = 32;             // slices it takes at a time
  };

  virtual ~Rail() = default;
  virtual const Properties& properties() const = 0;

  // The share of the work on local region `region` that this rail gets: less where that memory is
  // far from the device.
  virtual double share(uint32_t /*region*/) const { return properties().bytes_per_second; }

  // OK if this rail moves bytes from and to the local region; else the reason and the remedy.
  virtual absl::Status moves(const RegionEntry& region) const;
  // OK if this rail copies between local region `local` and the peer's region through a mapping of
  // the peer's memory, both in device memory; else the reason. Unavailable: the mapping is being
  // made.
  virtual absl::Status maps(const RegionEntry& local, const RemoteRegion& remote) const;
  // Text for explain() about device memory; empty while there is nothing to report.
  virtual std::string about_devices() const { return {}; }
  // True if the rail reaches device memory that the peer registered with its provider of the same
  // kind.
  virtual bool reaches_devices() const { return false; }

  // OK if this rail can reach the region; else the reason and the remedy.
  virtual absl::Status reaches(const RemoteRegion& remote) const = 0;

  // A direct view of the region, where this path has one. Unavailable: not yet, ask again.
  virtual absl::StatusOr<RemoteView> view(const RemoteRegion& /*remote*/) const {
    return absl::UnimplementedError(properties().provider + " cannot map a peer's memory");
  }

  // Whether the peer, if its path is of the same kind, sees files behind our memory as view() shows
  // its own here.
  virtual bool shows_files() const { return false; }

  // Writes `from`, all of the transfer's bytes, to a place that is one run, and raises its counter:
  // when it returns true they are visible at the target, as of a slice that has ended well. False:
  // not now, or not over this path.
  virtual bool write_now(const TransferDescriptor& /*write*/, const std::byte* /*from*/) {
    return false;
  }

  // Takes a slice; false when the rail is full (post again after its next slice_done). May report
  // the slice before it returns.
  virtual bool post(const Slice& slice, EventSink& sink) = 0;

  // Stop moving bytes of this transfer as soon as the wire allows. Its slices still report.
  virtual void abort(TransferId transfer, EventSink& sink) = 0;

  // After abort(): whether no byte of the transfer's local memory is read or written for this rail
  // any more, though some of its slices wait for the target's word.
  virtual bool let_go(TransferId /*transfer*/) const { return false; }

  // Close for good: report every slice with `why`, then rail_down().
  virtual void close(absl::Status why, EventSink& sink) = 0;

  // A number the worker keeps here for itself.
  uint64_t worker_tag = 0;
};

// What a provider can do on this machine, and what it cannot do and why.
struct Capabilities {
  std::string name;
  int rank =
      0;  // of routes that reach the peer the highest wins: shm 300, verbs 200, ucx 50, tcp 10
  bool available = false;
  std::string detail;  // for people: devices, features; or the reason and the remedy
};

// The HelloInfo that the peer gets has this session and `resume`, and a link_number() for each
// rail; accepted() there and connected() here tell the same link.
struct ConnectRequest {
  uint64_t session = 0;  // chosen by the worker; comes back in the events
  Resume resume = Resume::kNew;
  std::string address;  // the peer's, as its provider's listen() returned it
  std::string called;   // where it answered query(); empty: it was not asked
  HelloInfo expected;   // uid must match where set (not all zero)
};

class Provider {
 public:
  virtual ~Provider() = default;
  virtual const Capabilities& capabilities() const = 0;

  // Start accepting peers; returns the address to hand out. Called once. InvalidArgument, NotFound
  // and PermissionDenied are of the listen_host, advertise or port that the context asks for, which
  // must be right then; AlreadyExists says that the port is in use.
  virtual absl::StatusOr<std::string> listen() = 0;
  // The port of IP that it listens on, whatever others are told; 0: none.
  virtual uint16_t port() const { return 0; }
  // The worker's whole encoded Address, known once all providers listen: the answer to queries.
  virtual void set_worker_address(const std::string& /*encoded*/) {}

  // Can `address` of a worker on `host_id` be reached from here? The reason where not.
  virtual absl::Status reachable(const std::string& address, std::string_view host_id) const = 0;
  // Start connecting; the outcome comes as connected() / connect_failed().
  virtual void connect(const ConnectRequest& request) = 0;
  // Turns "host:port" into addresses for query(). This is the only call that may block (on DNS).
  // Any thread may make it, without the progress lock.
  virtual absl::StatusOr<std::string> look_up(const std::string& /*host_port*/) const {
    return absl::UnimplementedError("this provider cannot look up host:port");
  }
  // Ask the worker at one of these addresses for its Address; the answer comes as resolved().
  virtual absl::Status query(uint64_t /*session*/, const std::string& /*addresses*/) {
    return absl::UnimplementedError("this provider cannot resolve host:port");
  }

  // OK if this provider could move the region's bytes; else the reason and the remedy. A worker
  // registers device memory only with providers that return OK.
  virtual absl::Status takes(const RegionEntry& region) const;
  // For device memory that it does not take: whether its peers may still map it, so that
  // it is given the region too. What they cannot map is staged.
  virtual bool shares(const RegionEntry& /*region*/) const { return false; }
  // Once per registered slab. remove_region() fences: after it returned OK no peer touches the
  // memory any more. kUnavailable: a peer that stands still in the middle of a copy may; it is cut
  // off, and the text says what must end before the memory is used again.
  virtual absl::Status add_region(const RegionEntry& region) = 0;
  virtual absl::Status remove_region(const RegionEntry& region, EventSink& sink) = 0;
  // Before that: no peer begins to touch the memory any more. False: one is in the middle of a copy
  // and is still given time. Where it was true remove_region() does not wait for copies.
  virtual bool revoke_region(const RegionEntry& /*region*/) { return true; }

  // Advance everything; true if anything happened.
  virtual bool progress(EventSink& sink) = 0;

  // True while work is under way whose end wakes no thread (a copy on a device): poll for it.
  virtual bool polls() const { return false; }

  // Sleeping: wait_fd() becomes readable when there is work (-1: never). arm() is called before the
  // worker sleeps; false means there is work already. next_timer(): when progress() must run at
  // the latest, kNever if only the fd matters.
  virtual int wait_fd() const = 0;
  virtual bool arm() = 0;
  virtual Time next_timer() const { return kNever; }
};

// Slices and transfers up to this size overtake larger ones: control never waits behind bulk.
inline constexpr size_t kUrgentBytes = 64 << 10;

// The worker's side of a provider, passed in when it is made. References outlive the provider.
struct ProviderContext {
  const Clock& clock;
  const ClusterKey& key;
  HelloInfo self;  // session, rail and rails are filled in per connection
  std::string host_id;
  RegionTable& regions;
  CounterTable& counters;
  std::string listen_host;   // as WorkerOptions has it
  std::string advertise;     // likewise
  uint16_t listen_port = 0;  // 0 = any
  SettingValues settings;    // to be read by a SettingsReader
};

using ProviderFactory = std::function<std::unique_ptr<Provider>(const ProviderContext&)>;

// Providers register themselves from their own source file (a static ProviderRegistration), so
// that transport/ names none of them.
class ProviderRegistration {
 public:
  // `settings`: all that the provider reads, in an array that stays. `why_on_request`: workers have
  // the provider only where their options ask for it (asked_for()), for this reason.
  ProviderRegistration(const char* name, ProviderFactory factory,
                       absl::Span<const Setting> settings = {}, const char* why_on_request = "");
};
// All registered, by name.
const std::vector<std::pair<std::string, ProviderFactory>>& registered_providers();
// InvalidArgument: no provider has this name; the text lists the providers and the nearest name.
absl::Status check_provider(std::string_view name);
// Why workers do not have this provider unasked; "": they have.
std::string_view why_on_request(std::string_view provider);

}  // namespace baton
