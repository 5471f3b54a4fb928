// How transfers begin: checked at submit(), taken up, handed to the dispatcher.
#include "transport/internal/worker/transfers.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/base/durations.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {
namespace {

bool inside(const Layout& layout, size_t region_bytes) {
  return layout.dims().empty() && layout.piece_bytes() <= region_bytes &&
         layout.offset() <= region_bytes - layout.piece_bytes();
}

Access remote_access(Op op) {
  return op == Op::kWrite ? Access::kRemoteWrite : Access::kRemoteRead;
}

// Whether check() would pass, for the plainest kind of transfer.
bool is_plain(const TransferRequest& request) {
  const size_t bytes = request.local_layout.piece_bytes();
  const bool write = request.op == Op::kWrite;
  if (bytes - 1 >= kTinyBytes || request.remote_layout.piece_bytes() != bytes ||
      !inside(request.local_layout, request.local.size) ||
      !inside(request.remote_layout, request.remote.size) || !request.notify.empty() ||
      StreamOrder::wanted(request) || request.local.generation == 0 ||
      request.remote.generation == 0 || request.remote.kind != MemoryKind::kHost ||
      !allows(request.remote.access, remote_access(request.op)) ||
      (!write && request.op != Op::kRead)) {
    return false;
  }
  return request.counter.generation == 0 ||
         (write && request.increment == 1 && request.counter.index < CounterTable::kCapacity);
}

}  // namespace

Transfers::Transfers(WorkerCore& core) : core_(core), order_(core.slots.capacity()) {
  deadlines_.reserve(2 * size_t{core.slots.capacity()} + 1);
  stopped_.reserve(core.slots.capacity());
}

void Transfers::look_for_cancels() {
  cancels_.store(true);
  core_.wakeups.wake();
}

absl::Status Transfers::check(const TransferRequest& request) const {
  if (request.op != Op::kWrite && request.op != Op::kRead) {
    return absl::InvalidArgumentError(absl::StrFormat("op is Op::kWrite or Op::kRead, not %u",
                                                      static_cast<unsigned>(request.op)));
  }
  if (request.peer.generation == 0) {
    return absl::NotFoundError("no such peer: use the PeerId that connect() or an event gave");
  }
  if (!core_.peers.knows(request.peer)) {
    return absl::NotFoundError("the peer is gone: connect again and use the new PeerId");
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
  if (request.counter.generation != 0 && request.increment > CounterTable::kMaxValue) {
    return absl::InvalidArgumentError(
        absl::StrFormat("an increment of %u: a counter holds %u at most", request.increment,
                        CounterTable::kMaxValue));
  }
  if (request.timeout == kNever && StreamOrder::wanted(request)) {
    return absl::InvalidArgumentError(
        "a transfer that keeps order with a stream needs a timeout: nothing else would end the "
        "wait, should the other one never come");
  }
  if (bytes == 0) return absl::OkStatus();
  if (request.local.generation == 0) {
    return absl::InvalidArgumentError("the local side names no registered memory region");
  }
  if (request.remote.generation == 0) {
    return absl::InvalidArgumentError("the remote side names no region: pass its RemoteRegion");
  }
  if (!allows(request.remote.access, remote_access(request.op))) {
    return absl::PermissionDeniedError(
        absl::StrFormat("the remote region does not allow remote %s: its owner must register it so",
                        request.op == Op::kWrite ? "writes" : "reads"));
  }
  absl::Status status = request.local_layout.check(request.local.size, "local");
  if (status.ok()) status = request.remote_layout.check(request.remote.size, "remote");
  return status;
}

absl::StatusOr<TransferId> Transfers::submit(const TransferRequest& request) {
  if (const TransferId id = submit_promptly(request); id.generation != 0) return id;
  if (absl::Status status = check(request); !status.ok()) return status;
  const TransferId id = take_slot(request);
  if (id.generation == 0) return no_slot(request);
  const bool ordered = StreamOrder::wanted(request);
  if (ordered) {
    const Time deadline = base::deadline_after(core_.clock.now(), request.timeout);
    if (absl::Status status = order_.begin(id, request, deadline); !status.ok()) {
      core_.slots.give_back(id);
      core_.peers.share(request.peer).give_back(!request.notify.empty());
      return status;
    }
    core_.slots[id.slot].ordered_generation.store(id.generation, std::memory_order_relaxed);
  }
  fill(id, request);
  if (ordered || !post_at_once(id.slot)) {
    core_.slots.push(id);
    core_.wakeups.wake();
  }
  return id;
}

// Generation 0: no free slot, or none for this peer.
TransferId Transfers::take_slot(const TransferRequest& request) {
  const bool notifies = !request.notify.empty();
  PeerShare& share = core_.peers.share(request.peer);
  const TransferId id = core_.slots.acquire(share.take(notifies), notifies);
  if (id.generation == 0) share.give_back(notifies);
  return id;
}

// The error says which peers have the slots: mostly not the one asked for.
absl::Status Transfers::no_slot(const TransferRequest& request) {
  const uint32_t capacity = core_.slots.capacity();
  const uint32_t free = core_.slots.free();
  const PeerShare::Open open = core_.peers.share(request.peer).open();
  const PeerTable::Usage usage = core_.peers.usage();
  // The worker's own words to its peers may have some too, for a moment.
  const uint64_t taken = capacity - free;
  const uint64_t unreleased = taken > usage.open ? taken - usage.open : 0;
  const std::string and_ended =
      unreleased == 0 ? "" : absl::StrFormat(", %u have ended and wait to be released", unreleased);
  constexpr std::string_view kWhatToDo =
      "Try again when some have ended, cancel or release some, or raise max_transfers";
  if (free == 0) {
    const std::string with = usage.most == 0
                                 ? ""
                                 : absl::StrFormat(" (the peer with most, \"%s\", has %u)",
                                                   core_.peers.name(usage.peer), usage.most);
    return absl::ResourceExhaustedError(
        absl::StrFormat("all %u transfers are in use: %u have not ended%s%s. %s", capacity,
                        usage.open, with, and_ended, kWhatToDo));
  }
  const bool notifications =
      !request.notify.empty() && PeerShare::leaves_room(open, false, free, capacity);
  std::string_view why = notifications ? "They wait until what is there has been read. " : "";
  const PeerState state = core_.peers.state(request.peer);
  if (state == PeerState::kConnecting) why = "It is not connected yet. ";
  if (state == PeerState::kReconnecting) why = "It was lost, and is called again. ";
  return absl::ResourceExhaustedError(absl::StrFormat(
      "peer \"%s\" has its share of the %u transfers, the rest is for other work: %u %s have not "
      "ended%s. %s%s",
      core_.peers.name(request.peer), capacity, notifications ? open.notifying : open.all,
      notifications ? "with notifications" : "of its", and_ended, why, kWhatToDo));
}

void Transfers::fill(TransferId id, const TransferRequest& request) {
  TransferSlot& slot = core_.slots[id.slot];
  TransferDescriptor& d = slot.descriptor;
  d.id = id;
  d.op = request.op;
  d.bytes = request.local_layout.bytes();
  d.local_base = d.bytes == 0 ? nullptr : request.local.base;
  d.local_region = d.bytes == 0 ? 0 : request.local.index;
  d.local = request.local_layout;
  d.remote = request.remote;
  d.remote_layout = request.remote_layout;
  d.counter = request.counter;
  d.increment = request.increment;
  d.polled = request.polled;
  char* copy = slot.notify_inline.data();
  if (request.notify.size() > slot.notify_inline.size()) {
    slot.notify_heap.resize(request.notify.size());
    copy = slot.notify_heap.data();
  }
  std::copy(request.notify.begin(), request.notify.end(), copy);
  d.notify = {copy, request.notify.size()};
  slot.peer = request.peer;
  slot.local = request.local;
  // The clock costs a small message more than all else here.
  slot.deadline =
      request.timeout == kNever ? kNever : base::deadline_after(core_.clock.now(), request.timeout);
  slot.on_end = request.on_end;
  slot.context = request.context;
  slot.detached = request.detached;
  slot.notifies = !request.notify.empty();
  slot.control = false;
  submitted_.fetch_add(1, std::memory_order_relaxed);
}

// The short way of a small transfer: with the adapter first, everything else afterwards. What is
// not as plain as it can be goes the usual way, which also says what is wrong with it.
TransferId Transfers::submit_promptly(const TransferRequest& request) {
  constexpr TransferId kNotHere{};
  if (!may_post_here() || !is_plain(request)) return kNotHere;
  const std::unique_lock lock(core_.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return kNotHere;
  Peer* const peer = peer_without_queue(request.peer);
  if (peer == nullptr || peer->parting || request.remote.owner != peer->uid ||
      (request.counter.generation != 0 && request.counter.owner != peer->uid)) {
    return kNotHere;
  }
  const absl::StatusOr<RegionEntry*> local = local_entry(request.local, request.op);
  if (!local.ok() || (*local)->place.kind != MemoryKind::kHost) return kNotHere;
  RailState& rail = peer->rails.front();
  if (rail.prompt == nullptr) return kNotHere;
  const TransferId id = take_slot(request);
  if (id.generation == 0) return kNotHere;
  TransferSlot& slot = core_.slots[id.slot];
  if (!rail.prompt->post_promptly(request, slot.descriptor)) {
    core_.slots.give_back(id);
    core_.peers.share(request.peer).give_back(false);
    return kNotHere;
  }
  // It is on its way: what follows delays nothing.
  fill(id, request);
  begin(slot);
  slot.slice_bytes = slot.descriptor.bytes;
  slot.next_slice = slot.outstanding = 1;
  ++(*local)->users;
  slot.uses_region = true;
  note_deadline(slot);
  ++peer->open;
  peer->turns.small_went(slot.descriptor.bytes, peer->bulk.head != kNone);
  rail.took(slot.descriptor.bytes);
  ++core_.stats.open_transfers;
  ++core_.stats.slices_posted;
  // A sleeping thread must take the new timer into account.
  if (core_.wakeups.sleeping()) core_.wakeups.wake();
  return id;
}

// A small transfer with nothing queued before it is posted to the adapter from here, whichever
// thread drives the worker: this is the first half of a round of progress for one transfer. A
// thread that holds the lock is about to make a round itself.
bool Transfers::post_at_once(uint32_t index) {
  if (!may_post_here() || core_.slots[index].descriptor.bytes > PromptRail::kMost) return false;
  const std::unique_lock lock(core_.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  Peer* const peer = peer_without_queue(core_.slots[index].peer);
  if (peer == nullptr ||
      !std::all_of(peer->rails.begin(), peer->rails.end(), [&](const RailState& state) {
        if (state.rank < peer->rails.front().rank) return true;  // not in use
        return state.prompt != nullptr && state.prompt->prompt();
      })) {
    return false;
  }
  activate(index);
  core_.dispatcher.pump_urgent(*peer);
  // A sleeping thread must see new timers, and transfers that ended at once.
  if (core_.wakeups.sleeping()) core_.wakeups.wake();
  return true;
}

// Whether a caller may post: some rail is prompt, and this is not an EndCallback.
bool Transfers::may_post_here() const {
  return prompt_rails_.load(std::memory_order_relaxed) &&
         !announcing_.load(std::memory_order_relaxed);
}

// The peer, if it is up and nothing waits in front of a small transfer to it.
Peer* Transfers::peer_without_queue(PeerId id) {
  Peer* const peer = core_.slots.has_submitted() ? nullptr : core_.peers.find(id);
  const bool quiet = peer != nullptr && peer->state == PeerState::kUp && !peer->rails.empty() &&
                     peer->urgent.head == kNone && !peer->turns.large_is_due();
  return quiet ? peer : nullptr;
}

absl::StatusOr<RegionEntry*> Transfers::local_entry(const MemoryRegion& region, Op op) {
  absl::StatusOr<RegionEntry*> entry = core_.regions.find(region);
  if (entry.ok() && op == Op::kRead && !(*entry)->writable) {
    entry = absl::InvalidArgumentError(
        "a read into memory that was mapped read-only when it was registered: map it with "
        "PROT_WRITE first, or read into other memory");
  }
  return entry;
}

bool Transfers::take_submissions() {
  bool any = false;
  for (; core_.slots.has_submitted(); any = true) activate(core_.slots.pop_submitted());
  return any;
}

bool Transfers::flush_control_messages() {
  for (uint32_t index; (index = core_.outbox.next()) != kNone;) activate(index);
  return true;
}

void Transfers::begin(TransferSlot& slot) {
  slot.slice_bytes = 0;  // decided when the peer's rails are known
  slot.slices = 1;
  slot.next_slice = slot.outstanding = slot.unsettled = slot.reposts = slot.landed = 0;
  slot.credit = 0;
  slot.held = false;
  slot.again.clear();
  slot.live = slot.descriptor.id.generation;
  slot.uses_region = slot.queued = slot.listed = slot.staged = slot.mapped = slot.passes = false;
  slot.verdict = TransferState::kActive;
  slot.result = absl::OkStatus();
}

void Transfers::note_deadline(const TransferSlot& slot) {
  if (slot.deadline == kNever) return;
  // Entries of ended transfers stay until their time; thrown out here before the heap can grow.
  if (deadlines_.size() >= 2 * core_.slots.capacity()) {
    std::erase_if(deadlines_, [this](const auto& entry) {
      const TransferSlot* other = core_.slots.find(entry.second);
      return other == nullptr || ended(TransferSlots::state_of(other->word.load()));
    });
    std::make_heap(deadlines_.begin(), deadlines_.end(), kLater);
  }
  deadlines_.emplace_back(slot.deadline, slot.descriptor.id);
  std::push_heap(deadlines_.begin(), deadlines_.end(), kLater);
}

void Transfers::activate(uint32_t index) {
  TransferSlot& slot = core_.slots[index];
  const TransferDescriptor& d = slot.descriptor;
  begin(slot);
  if (!slot.control) ++core_.stats.open_transfers;

  Peer* peer = core_.peers.find(slot.peer);
  if (peer != nullptr && !slot.control) ++peer->open;
  if (peer == nullptr || peer->state == PeerState::kDown) {
    stop(index, TransferState::kFailed,
         peer == nullptr ? absl::NotFoundError("the peer is gone: connect again") : peer->why);
    return;
  }
  if (peer->parting && !slot.control)
    return stop(index, TransferState::kFailed, peer->parting->why);
  if (d.bytes > 0) {
    const absl::StatusOr<RegionEntry*> entry = local_entry(slot.local, d.op);
    if (!entry.ok()) return stop(index, TransferState::kFailed, entry.status());
    ++(*entry)->users;
    slot.uses_region = true;
  }
  note_deadline(slot);
  if (slot.ordered()) {
    standing_aside_.push_back(d.id);
  } else {
    line_up(*peer, index);
  }
}

// Behind the others that may begin.
void Transfers::line_up(Peer& peer, uint32_t index) {
  TransferSlot& slot = core_.slots[index];
  const TransferDescriptor& d = slot.descriptor;
  if (!d.notify.empty() && !slot.control) {
    const uint64_t cost = d.notify.size() + kNotificationCost;
    slot.held = peer.held.head != kNone || peer.credit < cost;
    if (!slot.held) peer.credit -= slot.credit = cost;
  }
  core_.dispatcher.enqueue(peer, index);
}

bool Transfers::look_at_streams() {
  const size_t before = standing_aside_.size();
  const Time now = core_.clock.now();
  std::erase_if(standing_aside_, [&](TransferId id) {
    TransferSlot* slot = core_.slots.find(id);
    if (slot == nullptr || slot->verdict != TransferState::kActive) return true;  // stopped
    std::optional<absl::Status> may = order_.may_begin(id, now);
    if (!may.has_value()) return false;
    if (may->ok()) {
      line_up(*core_.peers.find(slot->peer), id.slot);  // a peer that goes down stops its own
    } else {
      stop(id.slot, TransferState::kFailed, *std::move(may));
    }
    return true;
  });
  return standing_aside_.size() != before;
}

}  // namespace baton::internal
