// The worker's public calls: each takes the progress lock, or needs none.
#include "transport/worker.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/copies/fault_guard.h"
#include "transport/base/environment.h"
#include "transport/base/log.h"
#include "transport/base/threads/forks.h"
#include "transport/internal/mapped.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton {
namespace {

// The others are the worker's own.
constexpr uint32_t kMostTransfers =
    internal::Arrivals::kMaxSlots - internal::TransferSlots::kReserved;

absl::Status stale_id() {
  return absl::NotFoundError(
      "no such transfer: its id is stale (released already) or from another worker");
}

// A variable that no code reads is most likely mistyped: said once in a process.
void warn_of_environment() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const std::string& wrong : base::wrong_environment())
      base::log_event(base::LogLevel::kWarning, "%s", wrong);
  });
}

std::string names(const std::vector<std::unique_ptr<Provider>>& providers) {
  return absl::StrJoin(providers, ", ", [](std::string* out, const auto& provider) {
    out->append(provider->capabilities().name);
  });
}

}  // namespace

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Worker::~Worker() {
  if (impl_ == nullptr) return;
  if (impl_->of_parent()) {
    (void)impl_.release();
    return;
  }
  const base::ForkWaits fork_waits(base::ForkWaits::kMaking);
  delete impl_.get();  // reset() would hide it from what transfers call that end meanwhile
  (void)impl_.release();
}

absl::Status internal::WorkerCore::usable() const {
  if (!of_parent()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the worker belongs to the process that this one was forked from: make another one");
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::create(WorkerOptions options) {
  const base::ForkWaits fork_waits(base::ForkWaits::kMaking);
  // The first copy would put up the handlers of faults, in a thread that no fork waits for.
  const std::byte here{};
  (void)base::readable(&here, 1);
  if (options.max_transfers == 0 || options.max_transfers > kMostTransfers) {
    return absl::InvalidArgumentError(
        absl::StrFormat("max_transfers must be in [1, %u]", kMostTransfers));
  }
  if (options.name.size() > kMaxWorkerName) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the worker's name \"%s...\" has %u bytes: at most %u fit into its address",
                        options.name.substr(0, 16), options.name.size(), kMaxWorkerName));
  }
  if (absl::Status status = base::log_level_status(); !status.ok()) return status;
  warn_of_environment();
  if (absl::Status status = check_settings(options.settings); !status.ok()) return status;
  absl::StatusOr<ClusterKey> key = options.key ? *options.key : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  const WorkerUid uid = WorkerUid::random();
  absl::StatusOr<CounterTable> counters = CounterTable::create(uid);
  if (!counters.ok()) return counters.status();
  auto impl =
      std::make_unique<Impl>(std::move(options), *std::move(key), uid, *std::move(counters));
  if (absl::Status status = impl->start(); !status.ok()) return status;
  return std::unique_ptr<Worker>(new Worker(std::move(impl)));
}

absl::StatusOr<MemoryRegion> Worker::register_memory(void* data, size_t size, Access access,
                                                     BackingFile file) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  // A byte that a peer sends to memory that cannot take it would end this process.
  internal::Examined memory;
  if (data != nullptr) {
    absl::StatusOr<internal::Examined> found = internal::examine_memory(data, size, access, file);
    if (!found.ok()) return found.status();
    memory = *std::move(found);
  }
  const RegionEntry like{
      .file = memory.file, .place = memory.place, .by_address = memory.why_not_by_address.ok()};
  absl::Status ring;
  if (impl_->wants_ring(like)) ring = impl_->make_ring(memory.place.device);
  absl::StatusOr<MemoryRegion> region = impl_->register_examined(data, size, access, memory, ring);
  if (!region.ok() && like.place.device >= 0 && ring.ok() &&
      impl_->make_ring(like.place.device).ok()) {
    region = impl_->register_examined(data, size, access, memory, ring);
  }
  if (!region.ok()) return region;
  // Now, and not when a transfer first names a stream: that may be in an EndCallback. Where there
  // are none submit() says why.
  impl_->transfers.order().prepare(memory.place.device).IgnoreError();
  base::log_event(base::LogLevel::kInfo, "%s: registered region %u, %u bytes at %p, with %s",
                  impl_->self.name, region->index, size, data, names(impl_->providers));
  return region;
}

absl::StatusOr<RegionEntry*> internal::WorkerCore::unused_region(const MemoryRegion& region) {
  absl::StatusOr<RegionEntry*> entry = regions.find(region);
  if (!entry.ok()) return entry;
  transfers.take_submissions();
  if ((*entry)->users == 0) return entry;
  return absl::FailedPreconditionError(
      absl::StrFormat("%u open transfers still use this memory: wait for them or cancel them first",
                      (*entry)->users));
}

absl::StatusOr<bool> Worker::begin_deregister(const MemoryRegion& region) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  std::lock_guard lock(impl_->mutex);
  const auto entry = impl_->unused_region(region);
  if (!entry.ok()) return entry.status();
  bool fenced = true;
  for (auto& provider : impl_->providers) {
    if (provider->takes(**entry).ok() || provider->shares(**entry))
      fenced &= provider->revoke_region(**entry);
  }
  return fenced;
}

absl::Status Worker::deregister_memory(const MemoryRegion& region) {
  // Without the lock: a peer that is stopped in a copy holds up no other thread.
  absl::StatusOr<bool> fenced = begin_deregister(region);
  for (; fenced.ok() && !*fenced; fenced = begin_deregister(region)) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  if (!fenced.ok()) return fenced.status();
  std::lock_guard lock(impl_->mutex);
  const auto entry = impl_->unused_region(region);
  if (!entry.ok()) return entry.status();
  const RegionEntry row = **entry;
  absl::Status removed = impl_->regions.remove(region);
  for (auto& provider : impl_->providers) {
    if (provider->takes(row).ok() || provider->shares(row))
      removed.Update(provider->remove_region(row, *impl_));
  }
  if (impl_->staging != nullptr && row.place.kind != MemoryKind::kHost) impl_->staging->forget(row);
  base::log_event(base::LogLevel::kDebug, "%s: deregistered region %u, %u bytes", impl_->self.name,
                  row.index, row.size);
  return removed;
}

absl::StatusOr<RemoteRegion> Worker::remote_region(const MemoryRegion& region) const {
  std::lock_guard lock(impl_->mutex);
  auto entry = impl_->regions.find(region);
  if (!entry.ok()) return entry.status();
  if ((*entry)->access == Access::kLocal) {
    return absl::FailedPreconditionError(
        "this memory was registered for local use only: register it with remote access");
  }
  return impl_->regions.describe(**entry);
}

absl::StatusOr<CounterId> Worker::allocate_counter() {
  std::lock_guard lock(impl_->mutex);
  return impl_->counters.allocate();
}

absl::Status Worker::free_counter(CounterId id) {
  std::lock_guard lock(impl_->mutex);
  return impl_->counters.free(id);
}

uint64_t Worker::counter_value(CounterId id) const { return impl_->counters.value(id); }

RemoteCounter Worker::remote_counter(CounterId id) const { return impl_->counters.describe(id); }

const std::string& Worker::address() const { return impl_->address; }
uint16_t Worker::port() const { return impl_->port; }

absl::StatusOr<PeerId> Worker::connect(std::string_view address, std::string_view require) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  // A name is looked up by this thread alone: it may take as long as DNS does.
  std::string found;
  if (!internal::Routes::is_address(address)) {
    absl::StatusOr<std::string> addresses = impl_->routes.look_up(std::string(address));
    if (!addresses.ok()) return addresses.status();
    found = *std::move(addresses);
  }
  std::lock_guard lock(impl_->mutex);
  auto peer = impl_->routes.connect(address, found, require);
  impl_->wakeups.wake();
  return peer;
}

absl::Status Worker::disconnect(PeerId id, Time timeout) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  // Stays, should the peer be forgotten before it is looked at.
  std::shared_ptr<absl::Status> over;
  {
    std::lock_guard lock(impl_->mutex);
    internal::Peer* peer = impl_->find_peer(id);
    if (peer == nullptr) return absl::NotFoundError("no such peer");
    over = impl_->sessions.begin_disconnect(*peer, timeout);
  }
  impl_->wakeups.tell_waiters();
  absl::Status waited = wait_until([&] { return peer_state(id) == PeerState::kDown; });
  if (!waited.ok()) return waited;
  std::lock_guard lock(impl_->mutex);
  return *over;
}

void Worker::begin_disconnect(PeerId id, Time timeout) {
  if (impl_->of_parent()) return;
  {
    std::lock_guard lock(impl_->mutex);
    internal::Peer* peer = impl_->find_peer(id);
    if (peer == nullptr) return;
    impl_->sessions.begin_disconnect(*peer, timeout);
  }
  impl_->wakeups.tell_waiters();
}

PeerState Worker::peer_state(PeerId id) const { return impl_->peers.state(id); }

absl::Status Worker::peer_status(PeerId id) const {
  std::lock_guard lock(impl_->mutex);
  const internal::Peer* peer = impl_->find_peer(id);
  return peer == nullptr ? absl::NotFoundError("no such peer") : peer->why;
}

std::string Worker::explain(PeerId id) const {
  std::lock_guard lock(impl_->mutex);
  const internal::Peer* peer = impl_->find_peer(id);
  return peer == nullptr ? "no such peer" : impl_->sessions.explain(*peer);
}

absl::StatusOr<RemoteView> Worker::view(PeerId id, const RemoteRegion& region) const {
  std::lock_guard lock(impl_->mutex);
  const internal::Peer* peer = impl_->find_peer(id);
  if (peer == nullptr) return absl::NotFoundError("no such peer");
  if (peer->state == PeerState::kDown) return peer->why;
  return impl_->view(*peer, region);
}

absl::StatusOr<RemoteView> internal::WorkerCore::view(const internal::Peer& peer,
                                                      const RemoteRegion& region) const {
  if (peer.rails.empty()) return absl::UnavailableError("the peer is not connected yet");
  if (region.owner != peer.uid) {
    return absl::InvalidArgumentError("the region belongs to another worker than this peer");
  }
  absl::StatusOr<RemoteView> view = absl::UnimplementedError("no rail");
  for (const internal::RailState& rail : peer.rails) {
    view = rail.rail->view(region);
    if (view.ok()) break;
  }
  return view;
}

std::optional<PeerEvent> Worker::next_peer_event() {
  std::lock_guard lock(impl_->mutex);
  PeerEvent event;
  if (!impl_->inbox.next_event(event)) return std::nullopt;
  return event;
}

absl::StatusOr<TransferId> Worker::submit(const TransferRequest& request) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  return impl_->transfers.submit(request);
}

bool Worker::write_now(PeerId id, const void* from, size_t bytes, const RemoteRegion& to,
                       size_t offset, const RemoteCounter& counter, uint64_t increment) {
  if (impl_->of_parent()) return false;
  std::lock_guard lock(impl_->mutex);
  const internal::Peer* const peer = impl_->find_peer(id);
  if (peer == nullptr || peer->state != PeerState::kUp || peer->parting ||
      (bytes > 0 && to.owner != peer->uid) ||
      (counter.generation != 0 && counter.owner != peer->uid)) {
    return false;
  }
  TransferDescriptor write;
  write.remote = to;
  write.remote_layout = Layout::contiguous(offset, bytes);
  write.bytes = bytes;
  write.counter = counter;
  write.increment = increment;
  return std::any_of(peer->rails.begin(), peer->rails.end(), [&](const internal::RailState& rail) {
    return rail.rail->write_now(write, static_cast<const std::byte*>(from));
  });
}

absl::StatusOr<TransferId> Worker::notify(PeerId peer, std::string_view payload) {
  return submit({.op = Op::kWrite, .peer = peer, .notify = payload});
}

absl::Status Worker::notify_detached(PeerId peer, std::string_view payload) {
  return submit({.op = Op::kWrite, .peer = peer, .notify = payload, .detached = true}).status();
}

absl::StatusOr<TransferState> Worker::state(TransferId id) const {
  const internal::TransferSlot* slot = impl_->slots.find(id);
  if (slot == nullptr) return stale_id();
  const uint64_t word = slot->word.load(std::memory_order_acquire);
  return word >> 8 == id.generation && (word & 0xff) != 0
             ? internal::TransferSlots::state_of(word)
             : absl::StatusOr<TransferState>(stale_id());
}

absl::StatusOr<bool> Worker::local_free(TransferId id) const {
  const absl::StatusOr<TransferState> now = state(id);
  if (!now.ok()) return now.status();
  return ended(*now) ||
         impl_->slots[id.slot].free_generation.load(std::memory_order_acquire) == id.generation;
}

absl::Status Worker::status(TransferId id) const {
  // Another thread may release the transfer, and a third one use its slot, while we copy.
  std::lock_guard lock(impl_->mutex);
  auto now = state(id);
  if (!now.ok()) return now.status();
  if (!ended(*now)) return absl::UnavailableError("the transfer has not ended yet");
  return impl_->slots[id.slot].result;
}

absl::Status Worker::cancel(TransferId id) {
  internal::TransferSlot* slot = impl_->slots.find(id);
  if (slot == nullptr) return stale_id();
  // When two threads ask at once, for this transfer and the next one in its slot, the later counts.
  uint32_t asked = slot->cancel_generation.load(std::memory_order_relaxed);
  while (asked == 0 || static_cast<int32_t>(id.generation - asked) > 0) {
    if (slot->cancel_generation.compare_exchange_weak(
            asked, id.generation, std::memory_order_release, std::memory_order_relaxed)) {
      break;
    }
  }
  impl_->transfers.look_for_cancels();
  return absl::OkStatus();
}

absl::Status Worker::withdraw(TransferId id) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  if (impl_->slots.find(id) == nullptr) return stale_id();
  {
    std::lock_guard lock(impl_->mutex);
    impl_->withdraw(id);
  }
  impl_->wakeups.tell_waiters();
  return absl::OkStatus();
}

void internal::WorkerCore::withdraw(TransferId id) {
  if (const TransferSlot* slot = transfers.withdraw(id); slot != nullptr) {
    const Peer* peer = peers.find(slot->peer);
    for (size_t i = 0; peer != nullptr && i < peer->rails.size(); ++i) {
      const RailState& state = peer->rails[i];
      if (state.outstanding == 0 || state.rail->let_go(id)) continue;
      closing.close_later(peer->id(), state.rail.get(),
                          absl::UnavailableError("memory of a transfer on it was taken back"));
    }
    closing.run();
  }
  transfers.finish_stopped();
  wakeups.rouse();
  wakeups.wake();
}

absl::StatusOr<StreamOutcome> Worker::outcome(TransferId id) const {
  if (impl_->slots.find(id) == nullptr) return stale_id();
  return impl_->transfers.order().outcome(id);
}

absl::Status Worker::release(TransferId id) {
  const internal::TransferSlot* slot = impl_->slots.find(id);
  if (slot != nullptr &&
      slot->ordered_generation.load(std::memory_order_relaxed) == id.generation && state(id).ok() &&
      ended(*state(id))) {
    impl_->transfers.order().forget(id);
  }
  if (impl_->slots.release(id)) return absl::OkStatus();
  if (impl_->slots.find(id) == nullptr) return stale_id();
  return absl::FailedPreconditionError(
      "the transfer has not ended: cancel() it and wait for its end before release()");
}

absl::Status Worker::wait(TransferId id, Time timeout) {
  if (impl_->slots.find(id) == nullptr) return stale_id();
  absl::Status waited = wait_until(
      [&] {
        auto now = state(id);
        return !now.ok() || ended(*now);
      },
      timeout);
  if (!waited.ok()) return waited;
  absl::Status result = status(id);
  release(id).IgnoreError();
  return result;
}

absl::Status Worker::wait_until(const std::function<bool()>& ready, Time timeout) {
  if (absl::Status good = impl_->usable(); !good.ok()) return good;
  return impl_->wait_until(ready, timeout);
}

bool Worker::next_notification(Notification& out) {
  std::lock_guard lock(impl_->mutex);
  return impl_->inbox.next(out);
}

bool Worker::progress() {
  if (impl_->of_parent()) return false;
  bool any = false;
  {
    std::lock_guard lock(impl_->mutex);
    any = impl_->progress();
  }
  if (any) impl_->wakeups.tell_waiters();
  return any;
}

bool Worker::help() { return !impl_->of_parent() && impl_->help(); }

int Worker::wait_fd() const { return impl_->wakeups.wait_fd(); }

bool Worker::arm() {
  std::lock_guard lock(impl_->mutex);
  return impl_->arm(impl_->wakeups.outside());
}

Time Worker::next_timer() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->next_timer();
}

int Worker::event_fd() const {
  if (const int fd = impl_->wakeups.event_fd(); fd >= 0) return fd;
  std::lock_guard lock(impl_->mutex);
  return impl_->wakeups.make_event_fd();
}
void Worker::wake() { impl_->wakeups.rouse_all(); }

const Clock& Worker::clock() const { return impl_->clock; }

WorkerStats Worker::stats() const {
  std::lock_guard lock(impl_->mutex);
  WorkerStats stats = impl_->stats;
  stats.registrations = impl_->regions.registrations();
  stats.transfers_submitted = impl_->transfers.submitted();
  stats.notifications_waiting = impl_->inbox.waiting();
  return stats;
}

}  // namespace baton
