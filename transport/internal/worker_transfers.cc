// Transfers inside a worker: checked at submit(), cut into slices, striped over rails, moved to
// another rail when one fails, and ended exactly once.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/internal/worker_impl.h"

namespace baton {
namespace {

constexpr uint32_t kNone = internal::TransferSlot::kNone;
constexpr uint32_t kMaxReposts = 1000;

bool later(const std::pair<Time, TransferId>& a, const std::pair<Time, TransferId>& b) {
  return a.first > b.first;
}

size_t slice_begin(const internal::TransferSlot& slot, uint32_t index) {
  return index * slot.slice_bytes;
}
size_t slice_end(const internal::TransferSlot& slot, uint32_t index) {
  return std::min(slot.descriptor.bytes, slice_begin(slot, index) + slot.slice_bytes);
}

bool on_device(const RegionTable& regions, const TransferDescriptor& transfer) {
  return transfer.bytes > 0 &&
         regions.entries()[transfer.local_region].place.kind != MemoryKind::kHost;
}

}  // namespace

absl::Status Worker::Impl::check(const TransferRequest& request) const {
  if (request.peer.generation == 0) {
    return absl::NotFoundError("no such peer: use the PeerId that connect() or an event gave");
  }
  if (!peers.knows(request.peer)) {
    return absl::NotFoundError("the peer is gone: connect() again and use the new PeerId");
  }
  const size_t bytes = request.local_layout.bytes();
  const size_t remote_bytes = request.remote_layout.bytes();
  if (bytes != remote_bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the two sides differ in size: %u bytes local, %u remote", bytes, remote_bytes));
  }
  if (request.op == Op::kRead && (request.counter.generation != 0 || !request.notify.empty())) {
    return absl::InvalidArgumentError(
        "a read carries no counter and no notification: its bytes arrive here, so send a "
        "notify() when it is done");
  }
  if (request.notify.size() > kMaxNotification) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a notification of %u bytes is longer than the limit of %u: send the data as a transfer",
        request.notify.size(), kMaxNotification));
  }
  if (request.counter.generation != 0 && request.counter.index >= CounterTable::kCapacity) {
    return absl::InvalidArgumentError(
        "not a RemoteCounter: pass the one that the peer's remote_counter() gave out");
  }
  if (bytes == 0) return absl::OkStatus();
  if (request.local.generation == 0) {
    return absl::InvalidArgumentError("the local side names no registered memory region");
  }
  if (request.remote.generation == 0) {
    return absl::InvalidArgumentError("the remote side names no region: pass its RemoteRegion");
  }
  const Access want = request.op == Op::kWrite ? Access::kRemoteWrite : Access::kRemoteRead;
  if (!allows(request.remote.access, want)) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the remote region does not allow remote %s: its owner must register it so",
                        request.op == Op::kWrite ? "writes" : "reads"));
  }
  absl::Status status = request.local_layout.check(request.local.size, "local");
  if (status.ok()) status = request.remote_layout.check(request.remote.size, "remote");
  return status;
}

absl::StatusOr<TransferId> Worker::Impl::submit(const TransferRequest& request) {
  if (absl::Status status = check(request); !status.ok()) return status;
  absl::StatusOr<TransferId> id = slots.acquire();
  if (!id.ok()) return id;
  internal::TransferSlot& slot = slots[id->slot];
  TransferDescriptor& d = slot.descriptor;
  d.id = *id;
  d.op = request.op;
  d.bytes = request.local_layout.bytes();
  d.local_base = d.bytes == 0 ? nullptr : request.local.base;
  d.local_region = request.local.index;
  d.local = request.local_layout;
  d.remote = request.remote;
  d.remote_layout = request.remote_layout;
  d.counter = request.counter;
  d.increment = request.increment;
  char* copy = slot.notify_inline.data();
  if (request.notify.size() > slot.notify_inline.size()) {
    slot.notify_heap.resize(request.notify.size());
    copy = slot.notify_heap.data();
  }
  std::copy(request.notify.begin(), request.notify.end(), copy);
  d.notify = {copy, request.notify.size()};
  slot.peer = request.peer;
  slot.local = request.local;
  slot.deadline = request.timeout == kNever ? kNever : clock.now() + request.timeout;
  slot.on_end = request.on_end;
  slot.context = request.context;
  slot.detached = request.detached;
  slot.control = false;
  submitted.fetch_add(1, std::memory_order_relaxed);
  if (!post_at_once(id->slot)) {
    slots.push(*id);
    wake();
  }
  return id;
}

// A small transfer that nothing waits in front of goes to the adapter from here, whoever drives the
// worker: the first half of a round of progress, for this one. Whoever holds the lock is about to
// make a round himself.
bool Worker::Impl::post_at_once(uint32_t index) {
  if (!prompt_rails.load(std::memory_order_relaxed) || announcing.load(std::memory_order_relaxed) ||
      slots[index].descriptor.bytes > internal::PromptRail::kMost) {
    return false;
  }
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock() || slots.has_submitted()) return false;
  internal::Peer* peer = find_peer(slots[index].peer);
  if (peer == nullptr || peer->state != PeerState::kUp || peer->urgent.head != kNone ||
      peer->rails.empty() ||
      !std::all_of(peer->rails.begin(), peer->rails.end(), [&](const internal::RailState& state) {
        if (state.rank < peer->rails.front().rank) return true;  // not in use
        return state.prompt != nullptr && state.prompt->prompt();
      })) {
    return false;
  }
  activate(index);
  pump(*peer, peer->urgent);
  // Timers, and what has ended at once, are looked at by whoever sleeps.
  if (sleeping.load(std::memory_order_relaxed)) wake();
  return true;
}

bool Worker::Impl::take_submissions() {
  bool any = false;
  for (uint32_t index; (index = slots.pop_submitted()) != kNone; any = true) activate(index);
  return any;
}

void Worker::Impl::activate(uint32_t index) {
  internal::TransferSlot& slot = slots[index];
  const TransferDescriptor& d = slot.descriptor;
  slot.slice_bytes = 0;  // decided when the peer's rails are known
  slot.slices = 1;
  slot.next_slice = slot.outstanding = slot.unsettled = slot.reposts = slot.landed = 0;
  slot.credit = 0;
  slot.held = false;
  slot.again.clear();
  slot.live = d.id.generation;
  slot.uses_region = slot.queued = slot.listed = false;
  slot.verdict = TransferState::kActive;
  slot.result = absl::OkStatus();
  if (!slot.control) ++stats.open_transfers;

  internal::Peer* peer = find_peer(slot.peer);
  if (peer == nullptr || peer->state == PeerState::kDown) {
    stop(index, TransferState::kFailed,
         peer == nullptr ? absl::NotFoundError("the peer is gone: connect() again") : peer->why);
    return;
  }
  if (d.bytes > 0) {
    auto entry = regions.find(slot.local);
    if (!entry.ok()) return stop(index, TransferState::kFailed, entry.status());
    if (d.op == Op::kRead && !(*entry)->writable) {
      return stop(index, TransferState::kFailed,
                  absl::InvalidArgumentError(
                      "a read into memory that was mapped read-only when it was registered: map it "
                      "with PROT_WRITE first, or read into other memory"));
    }
    ++(*entry)->users;
    slot.uses_region = true;
  }
  if (slot.deadline != kNever) {
    // Entries of ended transfers stay until their time; thrown out here before the heap can grow.
    if (deadlines.size() >= 2 * slots.capacity()) {
      std::erase_if(deadlines, [this](const auto& entry) {
        const internal::TransferSlot* other = slots.find(entry.second);
        return other == nullptr || ended(internal::TransferSlots::state_of(other->word.load()));
      });
      std::make_heap(deadlines.begin(), deadlines.end(), later);
    }
    deadlines.emplace_back(slot.deadline, d.id);
    std::push_heap(deadlines.begin(), deadlines.end(), later);
  }
  if (!d.notify.empty() && !slot.control) {
    const uint64_t cost = d.notify.size() + internal::kNotificationCost;
    slot.held = peer->held.head != kNone || peer->credit < cost;
    if (!slot.held) peer->credit -= slot.credit = cost;
  }
  enqueue(*peer, index);
}

// The checks that need the peer to be up; and the cut into slices.
absl::Status Worker::Impl::admit(internal::TransferSlot& slot, internal::Peer& peer) {
  const TransferDescriptor& d = slot.descriptor;
  if (d.bytes > 0) {
    if (d.remote.owner != peer.uid) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the remote region belongs to another worker (%s) than peer %s (%s)",
                          d.remote.owner.hex(), peer.name, peer.uid.hex()));
    }
    if (absl::Status status = peer.rails.front().rail->reaches(d.remote); !status.ok()) {
      return status;
    }
  }
  if (d.counter.generation != 0 && d.counter.owner != peer.uid) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the counter belongs to another worker than peer %s", peer.name));
  }
  size_t bytes = SIZE_MAX;
  for (const internal::RailState& state : peer.rails) {
    bytes = std::min(bytes, state.rail->properties().slice_bytes);
  }
  const size_t least =
      (d.bytes + internal::Arrivals::kMaxSlices - 1) / internal::Arrivals::kMaxSlices;
  slot.slice_bytes = std::max({bytes, least, size_t{1}});
  slot.slices = 1;
  if (d.bytes > slot.slice_bytes) {
    slot.slices = static_cast<uint32_t>((d.bytes - 1) / slot.slice_bytes + 1);
  }
  return absl::OkStatus();
}

// Why no rail that is up moves memory like the transfer's: what is the host's, all do.
absl::Status Worker::Impl::movable(const internal::TransferSlot& slot,
                                   const internal::Peer& peer) const {
  absl::Status status;
  if (!on_device(regions, slot.descriptor)) return status;
  for (const internal::RailState& state : peer.rails) {
    status = state.rail->moves(regions.entries()[slot.descriptor.local_region]);
    if (status.ok()) break;
  }
  return status;
}

internal::RailState* Worker::Impl::rail_state(internal::Peer& peer, const Rail* rail) {
  for (internal::RailState& state : peer.rails) {
    if (state.rail.get() == rail) return &state;
  }
  return nullptr;
}

// Of those of the best provider, the one that would be done with another slice first.
internal::RailState* Worker::Impl::pick_rail(internal::Peer& peer,
                                             const internal::TransferSlot& slot) {
  internal::RailState* best = nullptr;
  double best_load = 0;
  for (internal::RailState& state : peer.rails) {
    if (state.rank < peer.rails.front().rank) break;
    const Rail::Properties& properties = state.rail->properties();
    if ((state.full && state.outstanding > 0) || state.outstanding >= properties.depth) continue;
    if (peer.rails.size() == 1) return &state;
    if (on_device(regions, slot.descriptor) &&
        !state.rail->moves(regions.entries()[slot.descriptor.local_region]).ok()) {
      continue;
    }
    const size_t bytes =
        state.outstanding_bytes + std::min(slot.slice_bytes, slot.descriptor.bytes);
    const double load =
        static_cast<double>(bytes) / state.rail->share(slot.descriptor.local_region);
    if (best == nullptr || load < best_load) {
      best = &state;
      best_load = load;
    }
  }
  return best;
}

bool Worker::Impl::pump() {
  bool any = false;
  // What rails report while they take slices may make more peers ready: those are for next time.
  const size_t count = ready_peers.size();
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    internal::Peer& peer = *ready_peers[i];
    if (peer.state == PeerState::kUp) {
      any |= pump(peer, peer.urgent);
      any |= pump(peer, peer.bulk);
    }
    peer.ready =
        peer.state == PeerState::kUp && (peer.urgent.head != kNone || peer.bulk.head != kNone);
    if (peer.ready) ready_peers[kept++] = &peer;
  }
  ready_peers.erase(ready_peers.begin() + static_cast<ptrdiff_t>(kept),
                    ready_peers.begin() + static_cast<ptrdiff_t>(count));
  return any;
}

// For pump(). A peer that is not up is made ready when it is.
void Worker::Impl::make_ready(internal::Peer& peer) {
  if (peer.state != PeerState::kUp || (peer.urgent.head == kNone && peer.bulk.head == kNone))
    return;
  if (!std::exchange(peer.ready, true)) ready_peers.push_back(&peer);
}

bool Worker::Impl::pump(internal::Peer& peer, internal::SlotQueue& queue) {
  bool any = false;
  while (queue.head != kNone && !peer.rails.empty()) {
    const uint32_t index = queue.head;
    internal::TransferSlot& slot = slots[index];
    if (slot.slice_bytes == 0) {
      if (absl::Status status = admit(slot, peer); !status.ok()) {
        stop(index, TransferState::kFailed, status);
        any = true;
        continue;
      }
    }
    if (absl::Status status = movable(slot, peer); !status.ok()) {
      stop(index, TransferState::kFailed, status);
      any = true;
      continue;
    }
    internal::RailState* state = pick_rail(peer, slot);
    if (state == nullptr) return any;
    const bool again = !slot.again.empty();
    const uint32_t number = again ? slot.again.back() : slot.next_slice;
    const Slice slice{&slot.descriptor, number, slice_begin(slot, number), slice_end(slot, number)};
    // Counted before post(), which may report the slice before it returns.
    if (again) {
      slot.again.pop_back();
    } else {
      ++slot.next_slice;
    }
    ++slot.outstanding;
    ++state->outstanding;
    state->outstanding_bytes += slice.end - slice.begin;
    Rail* rail = state->rail.get();
    if (!rail->post(slice, *this)) {
      --slot.outstanding;
      if (number + 1 == slot.next_slice) {
        --slot.next_slice;
      } else {
        slot.again.push_back(number);
      }
      internal::RailState* owner = rail_state(peer, rail);  // post() may have changed the list
      if (owner == nullptr) continue;
      --owner->outstanding;
      owner->outstanding_bytes -= slice.end - slice.begin;
      owner->full = true;
      if (owner->outstanding == 0) return any;  // it has room for nothing now: try next time
      continue;
    }
    if (slot.queued && slot.all_posted()) dequeue(peer, index);
    any = true;
    ++stats.slices_posted;
  }
  return any;
}

void Worker::Impl::slice_done(Rail& rail, TransferId transfer, uint32_t slice,
                              absl::Status status) {
  internal::Peer* peer = peer_of(rail);
  internal::TransferSlot* slot = slots.find(transfer);
  if (slot == nullptr || slot->outstanding == 0) return;  // a provider's bug must not become ours
  --slot->outstanding;
  if (status.ok()) {
    ++slot->landed;
    if (peer != nullptr) peer->redial.give_up_at = kNever;  // it is there, and knows us
  }
  if (internal::RailState* state = peer == nullptr ? nullptr : rail_state(*peer, &rail);
      state != nullptr) {
    --state->outstanding;
    state->outstanding_bytes -= slice_end(*slot, slice) - slice_begin(*slot, slice);
    state->full = false;
  }
  // Of a read, no byte moves here once its rail has reported it.
  if (absl::IsUnknown(status)) {
    if (slot->descriptor.op == Op::kWrite && peer != nullptr && peer->state != PeerState::kDown) {
      if (internal::RailState* state = rail_state(*peer, &rail); state != nullptr) {
        ++state->moved;
        return unsettled(*peer, state->link, {transfer, slice}, internal::ordinal_of(status));
      }
    }
    status = absl::UnavailableError(status.message());
  }
  const bool may_retry = absl::IsUnavailable(status) && ++slot->reposts <= kMaxReposts;
  if (status.ok() || slot->verdict != TransferState::kActive) {
    maybe_finish(transfer.slot);
  } else if (may_retry && peer != nullptr && peer->state != PeerState::kDown) {
    ++stats.slices_moved;
    if (internal::RailState* state = rail_state(*peer, &rail); state != nullptr) ++state->moved;
    slot->again.push_back(slice);
    if (!slot->queued) enqueue(*peer, transfer.slot);
  } else {
    const bool down = peer != nullptr && peer->state == PeerState::kDown;
    stop(transfer.slot, TransferState::kFailed, down ? peer->why : std::move(status));
  }
}

void Worker::Impl::stop(uint32_t index, TransferState verdict, absl::Status why) {
  internal::TransferSlot& slot = slots[index];
  if (slot.verdict != TransferState::kActive || slot.listed) return;
  slot.verdict = verdict;
  slot.result = std::move(why);
  internal::Peer* peer = find_peer(slot.peer);
  if (slot.queued && peer != nullptr) dequeue(*peer, index);
  slot.again.clear();
  slot.next_slice = slot.slices;
  if (slot.outstanding > 0 && peer != nullptr) {
    // abort() may report slices at once, and a rail may go down while we walk the list.
    for (size_t i = 0; i < peer->rails.size(); ++i) {
      Rail* rail = peer->rails[i].rail.get();
      rail->abort(slot.descriptor.id, *this);
      if (i < peer->rails.size() && peer->rails[i].rail.get() != rail) --i;
    }
  }
  if (slot.outstanding + slot.unsettled > 0) {
    slot.word.store((uint64_t{slot.descriptor.id.generation} << 8) |
                        (static_cast<uint64_t>(TransferState::kEnding) + 1),
                    std::memory_order_release);
  }
  maybe_finish(index);
}

void Worker::Impl::maybe_finish(uint32_t index) {
  internal::TransferSlot& slot = slots[index];
  if (slot.outstanding != 0 || slot.unsettled != 0 || !slot.all_posted()) return;
  if (std::exchange(slot.listed, true)) return;
  stopped.push_back(index);
}

// Announces ends outside of any provider's call, so that an EndCallback may do what it likes.
bool Worker::Impl::finish_stopped() {
  bool any = false;
  announcing.store(true, std::memory_order_relaxed);
  while (!stopped.empty()) {
    const uint32_t index = stopped.back();
    stopped.pop_back();
    any = true;
    internal::TransferSlot& slot = slots[index];
    if (slot.verdict == TransferState::kActive) {
      slot.verdict = TransferState::kDone;
      stats.bytes_moved += slot.descriptor.bytes;
    }
    if (slot.uses_region) {
      if (auto entry = regions.find(slot.local); entry.ok()) --(*entry)->users;
    }
    if (internal::Peer* peer = find_peer(slot.peer); peer != nullptr) {
      if (slot.credit != 0 && slot.landed < slot.slices) take_credit(*peer, slot.credit);
      if (slot.control && slot.verdict != TransferState::kDone) {
        peer->untold += slot.descriptor.increment;
        owe(*peer);
      }
    }
    if (slot.control) {  // others may have waited for the slot
      credits_due |= !creditors.empty();
      unsaid_due |= !unsaid.empty();
    }
    if (!slot.control) {
      --stats.open_transfers;
      ++stats.transfers_ended;
    }
    const TransferId id = slot.descriptor.id;
    const bool detached = slot.detached;
    if (slot.on_end != nullptr) slot.on_end(slot.context, id, slot.result);
    slot.word.store((uint64_t{id.generation} << 8) | (static_cast<uint64_t>(slot.verdict) + 1),
                    std::memory_order_release);
    if (detached) slots.release(id);
  }
  announcing.store(false, std::memory_order_relaxed);
  if (any) signal();
  return any;
}

bool Worker::Impl::take_cancels() {
  if (!cancels.load(std::memory_order_relaxed) || !cancels.exchange(false)) return false;
  for (uint32_t i = 0; i < slots.capacity(); ++i) {
    internal::TransferSlot& slot = slots[i];
    uint32_t asked = slot.cancel_generation.load(std::memory_order_acquire);
    if (asked == 0) continue;
    const uint64_t word = slot.word.load(std::memory_order_acquire);
    const bool active =
        word >> 8 == asked && internal::TransferSlots::state_of(word) == TransferState::kActive;
    if (active && slot.live != asked) {  // still among the submitted: next time
      cancels.store(true);
      continue;
    }
    slot.cancel_generation.compare_exchange_strong(asked, 0);
    if (active) stop(i, TransferState::kCancelled, absl::CancelledError("cancelled by cancel()"));
  }
  return true;
}

bool Worker::Impl::expire(Time now) {
  bool any = false;
  while (!deadlines.empty() && deadlines.front().first <= now) {
    const TransferId id = deadlines.front().second;
    std::pop_heap(deadlines.begin(), deadlines.end(), later);
    deadlines.pop_back();
    const internal::TransferSlot* slot = slots.find(id);
    if (slot == nullptr || slot->verdict != TransferState::kActive) continue;
    stop(id.slot, TransferState::kDeadline,
         absl::DeadlineExceededError(
             absl::StrFormat("the transfer's timeout ran out with %u of %u slices posted",
                             slot->next_slice, slot->slices)));
    any = true;
  }
  return any;
}

internal::SlotQueue& Worker::Impl::queue_of(internal::Peer& peer,
                                            const internal::TransferSlot& slot) {
  if (slot.held) return peer.held;
  return slot.descriptor.bytes <= kUrgentBytes ? peer.urgent : peer.bulk;
}

void Worker::Impl::enqueue(internal::Peer& peer, uint32_t index) {
  internal::TransferSlot& slot = slots[index];
  internal::SlotQueue& queue = queue_of(peer, slot);
  slot.queued = true;
  slot.next = kNone;
  slot.prev = queue.tail;
  (queue.tail == kNone ? queue.head : slots[queue.tail].next) = index;
  queue.tail = index;
  make_ready(peer);
}

void Worker::Impl::dequeue(internal::Peer& peer, uint32_t index) {
  internal::TransferSlot& slot = slots[index];
  internal::SlotQueue& queue = queue_of(peer, slot);
  (slot.prev == kNone ? queue.head : slots[slot.prev].next) = slot.next;
  (slot.next == kNone ? queue.tail : slots[slot.next].prev) = slot.prev;
  slot.queued = false;
}

}  // namespace baton
