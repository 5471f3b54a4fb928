// Posts slices of transfers to the rails of their peers.
#include "transport/internal/worker/dispatcher.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/lost_rails.h"
#include "transport/internal/worker/other_routes.h"
#include "transport/internal/worker/staging.h"
#include "transport/internal/worker/transfers.h"

namespace baton::internal {
namespace {

constexpr uint32_t kMaxReposts = 1000;
constexpr uint32_t kFew = 8;

size_t slice_begin(const TransferSlot& slot, uint32_t index) { return index * slot.slice_bytes; }
size_t slice_end(const TransferSlot& slot, uint32_t index) {
  return std::min(slot.descriptor.bytes, slice_begin(slot, index) + slot.slice_bytes);
}

bool on_device(const RegionTable& regions, const TransferDescriptor& transfer) {
  return transfer.bytes > 0 &&
         regions.entries()[transfer.local_region].place.kind != MemoryKind::kHost;
}

bool full(const RailState& state) {
  return (state.full && state.outstanding > 0) ||
         state.outstanding >= state.rail->properties().depth;
}

// Whether its slices tell how quick a rail is. Others do not wait until that is known.
bool counts(const TransferSlot& slot) {
  return std::min(slot.slice_bytes, slot.descriptor.bytes) >= RailPace::kCounts;
}

// How those of a peer's rails do beside each other that may move what there is to move.
struct Paces {
  template <typename May>
  Paces(const Peer& peer, const Clock& clock, uint32_t local_region, const May& may)
      : region(local_region) {
    bool matters = false;
    for (const RailState& state : peer.rails) {
      if (!may(state)) continue;
      best = std::max(best, state.pace.rate());
      slowest = std::min(slowest, state.rail->share(region));
    }
    for (const RailState& state : peer.rails) {
      matters |= state.pace.busy() || state.pace.rate() * RailPace::kSlow <= best;
    }
    if (matters) now = clock.now();
  }
  bool bad(const RailState& state) const {
    return state.pace.silent(now) > Time::zero() || state.pace.part_of(best, now) < 1;
  }
  // Whether it has as much as it may have while little is known of it: more where the port is
  // faster, or nearer.
  bool is_enough(const RailState& state) const {
    const double part = state.rail->share(region) / slowest;
    return state.pace.tried_enough(now, RailPace::kUntried * part);
  }
  // Whether nothing is known of it, but of others. What one rail has lost is not tried on another
  // that may be no better.
  bool none_of(const RailState& state) const { return best > 0 && state.pace.rate() == 0; }
  // When it would be done with so many bytes.
  double load(const RailState& state, size_t bytes) const {
    return static_cast<double>(bytes) /
               (state.rail->share(region) * state.pace.part_of(best, now)) +
           std::chrono::duration<double>(state.pace.silent(now)).count();
  }
  const uint32_t region;  // what is to be moved, here
  Time now{};
  double best = 0;
  double slowest = std::numeric_limits<double>::infinity();  // share
};

}  // namespace

absl::Status Dispatcher::moves(const Rail& rail, const TransferSlot& slot) const {
  const TransferDescriptor& d = slot.descriptor;
  const RegionEntry& local = core_.regions.entries()[d.local_region];
  return slot.mapped ? rail.maps(local, d.remote) : rail.moves(local);
}

// Why no rail that is up moves memory like the transfer's: what is the host's, all do.
absl::Status Dispatcher::movable(const TransferSlot& slot, const Peer& peer) const {
  absl::Status status;
  if (!on_device(core_.regions, slot.descriptor)) return status;
  for (const RailState& state : peer.rails) {
    status = moves(*state.rail, slot);
    if (status.ok()) break;
  }
  return status;
}

// The rail that carries the earlier messages: one rail keeps their order, two do not. Exceptions: a
// better provider is back, or the message is the worker's own and the rail is stuck.
RailState* Dispatcher::rail_of_messages(Peer& peer, const TransferSlot& slot, Time now) {
  for (RailState& state : peer.rails) {
    if (state.rank < peer.rails.front().rank) break;
    if (state.messages == 0) continue;
    return slot.control && state.pace.silent(now) > Time::zero() ? nullptr : &state;
  }
  return nullptr;
}

// The rail of the best provider that would finish another slice first. The smallest
// stay on the first as long as little is under way there: what answers them goes the same way.
// One that is much slower than others, or silent, has what would wait longer for those.
// Memory of devices goes on over the rails that move it, should a better one have come up
// meanwhile.
RailState* Dispatcher::pick_rail(Peer& peer, const TransferSlot& slot) {
  if (peer.rails.size() == 1) {
    // Others may be on their way: should this one be slow, it must not have all there is by then.
    RailState& only = peer.rails.front();
    return full(only) || (counts(slot) && only.pace.untried()) ? nullptr : &only;
  }
  const bool device = on_device(core_.regions, slot.descriptor);
  const RailState* const reaches = slot.passes ? peer.reaching(slot.descriptor.remote) : nullptr;
  const int rank = reaches != nullptr ? reaches->rank : peer.rails.front().rank;
  const auto may = [&](const RailState& state) {
    return device ? moves(*state.rail, slot).ok() : state.rank == rank;
  };
  const Paces paces(peer, core_.clock, slot.descriptor.local_region, may);
  if (slot.descriptor.bytes == 0) {
    RailState* const before = rail_of_messages(peer, slot, paces.now);
    if (before != nullptr) return full(*before) ? nullptr : before;
  }
  const bool again = !slot.again.empty();
  RailState* best = nullptr;
  double best_load = 0;
  bool best_is_bad = false;
  double least_full = std::numeric_limits<double>::infinity();  // of good ones that are full
  bool first = true;
  for (RailState& state : peer.rails) {
    if (!may(state)) continue;
    const bool bad = paces.bad(state);
    const bool first_good = !bad && std::exchange(first, false);
    const size_t bytes =
        state.outstanding_bytes + std::min(slot.slice_bytes, slot.descriptor.bytes);
    const double load = paces.load(state, bytes);
    const bool enough = (counts(slot) && paces.is_enough(state)) ||
                        (again && slot.descriptor.bytes > 0 && paces.none_of(state));
    if (full(state) || enough) {
      if (!bad) least_full = std::min(least_full, load);
      continue;
    }
    if (first_good && slot.descriptor.bytes <= kTinyBytes && state.outstanding < kFew &&
        state.outstanding_bytes <= kFew * kTinyBytes) {
      return &state;
    }
    if (best == nullptr || load < best_load) {
      best = &state;
      best_load = load;
      best_is_bad = bad;
    }
  }
  return best_is_bad && least_full < best_load ? nullptr : best;  // wait for a good one
}

Dispatcher::Dispatcher(WorkerCore& core) : core_(core) {
  // Room now, so that the hot path does not allocate later.
  ready_peers_.reserve(64);
}

bool Dispatcher::pump() {
  bool any = false;
  pump_due_ = false;
  // Reports of rails that take slices may make more peers ready: those wait for the next round.
  const size_t count = ready_peers_.size();
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    Peer& peer = *ready_peers_[i];
    if (peer.state == PeerState::kUp) any |= pump(peer);
    peer.ready =
        peer.state == PeerState::kUp && (peer.urgent.head != kNone || peer.bulk.head != kNone);
    if (peer.ready) ready_peers_[kept++] = &peer;
  }
  ready_peers_.erase(ready_peers_.begin() + static_cast<ptrdiff_t>(kept),
                     ready_peers_.begin() + static_cast<ptrdiff_t>(count));
  return any;
}

void Dispatcher::make_ready(Peer& peer) {
  if (peer.state != PeerState::kUp || (peer.urgent.head == kNone && peer.bulk.head == kNone))
    return;
  pump_due_ = true;
  if (!std::exchange(peer.ready, true)) ready_peers_.push_back(&peer);
}

// Urgent slices go first; bulk that they have overtaken for long gets one slice in between.
bool Dispatcher::pump(Peer& peer) {
  bool any = false;
  do {
    if (peer.turns.large_is_due()) any |= pump(peer, peer.bulk, true);
    any |= pump(peer, peer.urgent);
  } while (peer.turns.large_is_due() && peer.urgent.head != kNone && pump(peer, peer.bulk, true));
  return pump(peer, peer.bulk) || any;
}

// Posts slices of the queue, or one of them, as long as there is a rail for them; of `urgent` until
// it is the turn of bulk.
bool Dispatcher::pump(Peer& peer, SlotQueue& queue, bool one) {
  bool any = false;
  while (queue.head != kNone && !peer.rails.empty()) {
    const uint32_t index = queue.head;
    TransferSlot& slot = core_.slots[index];
    // Wait for the mapping; do not stage.
    if (slot.descriptor.remote.kind != MemoryKind::kHost &&
        (slot.slice_bytes == 0 || slot.mapped) && absl::IsUnavailable(mapped(slot, peer))) {
      pump_due_ = true;
      return any;
    }
    if (slot.slice_bytes == 0) {
      if (absl::Status status = admit(slot, peer); !status.ok()) {
        core_.transfers.stop(index, TransferState::kFailed, status);
        any = true;
        continue;
      }
      if (slot.staged) {
        any = true;
        continue;
      }
    }
    // The slice may have come back because the rail does not reach its region any more.
    const RemoteRegion& remote = slot.descriptor.remote;
    if (!slot.again.empty() && slot.descriptor.bytes > 0 && !slot.mapped) {
      slot.passes = !peer.rails.front().rail->reaches(remote).ok();
    }
    if (slot.passes && peer.reaching(remote) == nullptr) {
      core_.other_routes.stand_aside(peer, index);
      any = true;
      continue;
    }
    if (absl::Status status = movable(slot, peer); !status.ok()) {
      core_.transfers.stop(index, TransferState::kFailed, status);
      any = true;
      continue;
    }
    RailState* state = pick_rail(peer, slot);
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
    state->took(slice.end - slice.begin);
    if (slice.end - slice.begin >= RailPace::kCounts) {
      state->pace.took(slice.end - slice.begin, core_.clock.now());
    }
    Rail* rail = state->rail.get();
    if (!rail->post(slice, core_)) {
      --slot.outstanding;
      if (number + 1 == slot.next_slice) {
        --slot.next_slice;
      } else {
        slot.again.push_back(number);
      }
      RailState* owner = peer.find(rail);  // post() may have changed the list
      if (owner == nullptr) continue;
      owner->gave_back(slice.end - slice.begin);
      owner->pace.gave_back(slice.end - slice.begin);
      owner->full = true;
      if (owner->outstanding == 0) return any;  // it has room for nothing now: try next time
      continue;
    }
    const bool small = &queue == &peer.urgent;
    const size_t bytes = slice.end - slice.begin;
    if (slot.queued && slot.all_posted()) dequeue(peer, index);
    any = true;
    ++core_.stats.slices_posted;
    if (small) {
      peer.turns.small_went(bytes, peer.bulk.head != kNone);
      if (peer.turns.large_is_due()) return any;
    } else {
      peer.turns.large_went();
      if (one) return any;
    }
  }
  return any;
}

void Dispatcher::slice_done(Rail& rail, TransferId transfer, uint32_t slice,
                            absl::Status&& status) {
  Peer* peer = core_.peers.of(rail);
  TransferSlot* slot = core_.slots.find(transfer);
  if (slot == nullptr || slot->outstanding == 0) return;  // a provider's bug
  --slot->outstanding;
  if (status.ok()) {
    ++slot->landed;
    if (peer != nullptr) peer->redial.give_up_at = kNever;  // it is there, and knows us
    if (slot->control && peer != nullptr) {
      if (LostRail* asked = core_.lost_rails.asked_by(*peer, *slot); asked != nullptr)
        asked->heard = true;
    }
  }
  if (RailState* state = peer == nullptr ? nullptr : peer->find(&rail); state != nullptr) {
    const size_t bytes = slice_end(*slot, slice) - slice_begin(*slot, slice);
    state->gave_back(bytes);
    state->full = false;
    if (bytes >= RailPace::kCounts) {
      if (status.ok()) {
        state->pace.moved(bytes, core_.clock.now());
      } else {
        state->pace.gave_back(bytes);
      }
    }
  }
  // A question about a lost rail ends with the rail that it was on, and is asked again. It must not
  // wait for the peer's word on this rail: the peer may send that over the one that is asked about,
  // which it takes for alive until tcp.stall_ms.
  if (absl::IsUnknown(status) && peer != nullptr && slot->control &&
      core_.lost_rails.asked_by(*peer, *slot) != nullptr) {
    return core_.transfers.stop(transfer.slot, TransferState::kFailed, std::move(status));
  }
  // A read moves no byte here once its rail has reported it.
  if (absl::IsUnknown(status)) {
    if (slot->descriptor.op == Op::kWrite && peer != nullptr && peer->state != PeerState::kDown) {
      if (RailState* state = peer->find(&rail); state != nullptr) {
        ++state->moved;
        core_.lost_rails.unsettled(*peer, state->link, {transfer, slice}, ordinal_of(status));
        if (slot->verdict != TransferState::kActive) core_.transfers.let_go(*slot);
        return;
      }
    }
    status = absl::UnavailableError(status.message());
  }
  const bool may_retry = absl::IsUnavailable(status) && ++slot->reposts <= kMaxReposts;
  if (slot->verdict != TransferState::kActive) core_.transfers.let_go(*slot);
  if (status.ok() || slot->verdict != TransferState::kActive) {
    core_.transfers.maybe_finish(transfer.slot);
  } else if (may_retry && peer != nullptr && peer->state != PeerState::kDown) {
    ++core_.stats.slices_moved;
    if (RailState* state = peer->find(&rail); state != nullptr) ++state->moved;
    slot->again.push_back(slice);
    if (!slot->queued) enqueue(*peer, transfer.slot);
  } else {
    const bool down = peer != nullptr && peer->state == PeerState::kDown;
    core_.transfers.stop(transfer.slot, TransferState::kFailed,
                         down ? peer->why : std::move(status));
  }
}

SlotQueue& Dispatcher::queue_of(Peer& peer, const TransferSlot& slot) {
  if (slot.held) return peer.held;
  return slot.descriptor.bytes <= kUrgentBytes ? peer.urgent : peer.bulk;
}

void Dispatcher::enqueue(Peer& peer, uint32_t index) {
  TransferSlot& slot = core_.slots[index];
  SlotQueue& queue = queue_of(peer, slot);
  slot.queued = true;
  slot.next = kNone;
  slot.prev = queue.tail;
  (queue.tail == kNone ? queue.head : core_.slots[queue.tail].next) = index;
  queue.tail = index;
  make_ready(peer);
}

void Dispatcher::dequeue(Peer& peer, uint32_t index) {
  TransferSlot& slot = core_.slots[index];
  SlotQueue& queue = queue_of(peer, slot);
  (slot.prev == kNone ? queue.head : core_.slots[slot.prev].next) = slot.next;
  (slot.next == kNone ? queue.tail : core_.slots[slot.next].prev) = slot.prev;
  slot.queued = false;
}

void Dispatcher::take_credit(Peer& peer, uint64_t amount) {
  peer.credit += std::min(amount, kNotificationWindow - peer.credit);
  while (peer.held.head != kNone) {
    const uint32_t index = peer.held.head;
    TransferSlot& slot = core_.slots[index];
    const uint64_t cost = slot.descriptor.notify.size() + kNotificationCost;
    if (peer.credit < cost) return;
    dequeue(peer, index);
    peer.credit -= slot.credit = cost;
    slot.held = false;
    enqueue(peer, index);
  }
}

// Whether the best rails move the transfer's bytes by themselves: what is the hosts', all do.
bool Dispatcher::direct(const TransferSlot& slot, const Peer& peer) const {
  const TransferDescriptor& d = slot.descriptor;
  const RailState& best = peer.rails.front();
  if (d.remote.kind != MemoryKind::kHost && !(d.remote.direct && best.rail->reaches_devices())) {
    return false;
  }
  const RegionEntry& local = core_.regions.entries()[d.local_region];
  if (local.place.kind == MemoryKind::kHost) return true;
  return std::any_of(peer.rails.begin(), peer.rails.end(), [&](const RailState& state) {
    return state.rank == best.rank && state.rail->moves(local).ok();
  });
}

// Whether the best rail copies by a mapping of the peer's device memory.
absl::Status Dispatcher::mapped(const TransferSlot& slot, const Peer& peer) const {
  const TransferDescriptor& d = slot.descriptor;
  if (d.bytes == 0 || peer.rails.empty()) {
    return absl::FailedPreconditionError("nothing that a rail maps");
  }
  return peer.rails.front().rail->maps(core_.regions.entries()[d.local_region], d.remote);
}

// The checks that need the peer to be up; and the cut into slices, for which a rail must reach the
// region.
absl::Status Dispatcher::admit(TransferSlot& slot, Peer& peer) {
  const TransferDescriptor& d = slot.descriptor;
  // Asked of devices only: the answer is a status, which the host's transfers need not pay for.
  slot.mapped = d.remote.kind != MemoryKind::kHost && mapped(slot, peer).ok();
  const bool staged = d.bytes > 0 && !slot.mapped && !direct(slot, peer);
  if (d.bytes > 0) {
    if (d.remote.owner != peer.uid) {
      return absl::InvalidArgumentError(
          absl::StrFormat("the remote region belongs to another worker (%s) than peer %s (%s)",
                          d.remote.owner.hex(), peer.name, peer.uid.hex()));
    }
    if (!staged) {
      slot.passes = false;
      if (absl::Status status = peer.rails.front().rail->reaches(d.remote); !status.ok()) {
        if (absl::IsUnavailable(status)) return status;
        slot.passes = true;
        if (peer.reaching(d.remote) == nullptr) return absl::OkStatus();
      }
    }
  }
  if (d.counter.generation != 0 && d.counter.owner != peer.uid) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the counter belongs to another worker than peer %s", peer.name));
  }
  if (staged) return core_.staging_for_device_memory().begin(d.id.slot, peer);
  size_t bytes = SIZE_MAX;
  for (const RailState& state : peer.rails) {
    bytes = std::min(bytes, state.rail->properties().slice_bytes);
  }
  const size_t least = (d.bytes + Arrivals::kMaxSlices - 1) / Arrivals::kMaxSlices;
  slot.slice_bytes = std::max({bytes, least, size_t{1}});
  slot.slices = 1;
  if (d.bytes > slot.slice_bytes) {
    slot.slices = static_cast<uint32_t>((d.bytes - 1) / slot.slice_bytes + 1);
  }
  return absl::OkStatus();
}

}  // namespace baton::internal
