// Accesses to windows: their transfers, and what a signal waits for.
#include "collectives/internal/windows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/durations.h"
#include "transport/internal/device_memory.h"

namespace baton::collectives::internal {
namespace {

// Local memory of so few bytes is copied: to register it for one access would take longer.
constexpr size_t kMostCopied = 4096;

bool on_device(const void* data, size_t bytes) {
  const baton::internal::DeviceMemory* const devices = baton::internal::device_memory();
  if (devices == nullptr || bytes == 0) return false;
  const absl::StatusOr<MemoryPlace> place = devices->place(data, bytes);
  return place.ok() && place->kind == MemoryKind::kDevice;
}

}  // namespace

// --- starting ------------------------------------------------------------------------------------

std::string Windows::label(int rank) const {
  if (rank == static_cast<int>(needs_.mesh.rank())) return absl::StrFormat("rank %d", rank);
  return needs_.mesh.member(static_cast<uint32_t>(rank)).label;
}

// "put of 8 bytes at 64 to rank 3 (host, pid 17)"
std::string Windows::name(const Access& access) const {
  const std::string whose = access.rank == kAnyRank ? "all ranks" : label(access.rank);
  switch (access.kind) {
    case Kind::kPut:
      return absl::StrFormat("put of %u bytes at %u to %s", access.bytes, access.offset, whose);
    case Kind::kGet:
      return absl::StrFormat("get of %u bytes at %u from %s", access.bytes, access.offset, whose);
    case Kind::kSignal:
      return absl::StrFormat("signal %u to %s", access.slot, whose);
    case Kind::kWait:
      return absl::StrFormat("wait for signal %u of %s to be %u", access.slot, whose, access.value);
    default:
      return absl::StrCat("flush to ", whose);
  }
}

absl::Status Windows::about(const Access& access, const absl::Status& why) const {
  if (absl::IsNotFound(why)) {  // the key is stale
    return absl::FailedPreconditionError(
        absl::StrCat(name(access), ": that rank has destroyed its window"));
  }
  return absl::Status(why.code(), absl::StrCat(name(access), ": ", why.message()));
}

absl::Status Windows::check_slot(const Entry& entry, const Access& access) const {
  if (access.slot >= entry.signals) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "there are %u signals: WindowOptions::signals says how many", entry.signals));
  }
  if (access.value <= CounterTable::kMaxValue) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%u is more than a signal can be: 2^48 - 1", access.value));
}

absl::Status Windows::check(const Entry& entry, const Access& access) const {
  if (access.kind == Kind::kFlush && access.rank == kAnyRank) return absl::OkStatus();
  if (access.rank < 0 || access.rank >= static_cast<int>(needs_.mesh.ranks())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d: there are %u ranks", access.rank, needs_.mesh.ranks()));
  }
  absl::Status status;
  if (access.kind != Kind::kFlush && access.kind != Kind::kGet) status = check_slot(entry, access);
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(access.rank)];
  if (access.bytes > peer.bytes || access.offset > peer.bytes - access.bytes) {
    status =
        absl::InvalidArgumentError(absl::StrFormat("that rank's window has %u bytes", peer.bytes));
  } else if (access.bytes > 0 && access.local == nullptr) {
    status = absl::InvalidArgumentError("the local memory is null");
  } else if (access.kind == Kind::kSignal && access.value == 0) {
    status = absl::InvalidArgumentError("a signal adds 1 at least");
  } else if (access.bytes > 0 && access.rank == static_cast<int>(needs_.mesh.rank()) &&
             (on_device(access.local, access.bytes) ||
              on_device(entry.data + access.offset, access.bytes))) {
    status = absl::UnimplementedError(
        "a rank's access to its own window on a device: copy with the device's own means");
  }
  return status.ok() ? status : about(access, status);
}

absl::StatusOr<Work> Windows::start(const std::shared_ptr<Entry>& entry, const Access& access,
                                    const CallOptions& options) {
  if (!needs_.failure.broken().ok()) return needs_.failure.broken();
  if (absl::Status status = check(*entry, access); !status.ok()) return status;
  absl::StatusOr<Work> work = needs_.calls.start_plain(&options);
  if (!work.ok()) return work;
  if (access.rank == static_cast<int>(needs_.mesh.rank()) && access.kind != Kind::kWait &&
      access.kind != Kind::kFlush) {
    access_own(*entry, access);
    needs_.calls.end_plain(*work, absl::OkStatus());
    return work;
  }
  if (spare_.empty()) spare_.push_back(std::make_unique<Running>());
  std::unique_ptr<Running> op = std::move(spare_.back());
  spare_.pop_back();
  op->entry = entry;
  op->access = access;
  op->work = *work;
  op->deadline = base::deadline_after(needs_.calls.began(*work), options.timeout == Time::zero()
                                                                     ? needs_.options.timeout
                                                                     : options.timeout);
  op->moved = access.bytes == 0;
  op->signalled = access.kind == Kind::kGet || (access.kind == Kind::kPut && access.value == 0);
  op->transfer = op->given_up = false;
  ops_.push_back(std::move(op));
  return work;
}

void Windows::access_own(Entry& entry, const Access& access) {
  std::byte* const place = entry.data + access.offset;
  if (access.bytes > 0 && access.kind == Kind::kPut) {
    std::memmove(place, access.local, access.bytes);
  } else if (access.bytes > 0) {
    std::memmove(access.local, place, access.bytes);
  }
  if (access.value > 0) entry.peers[needs_.mesh.rank()].own[access.slot] += access.value;
}

uint64_t Windows::value(const Entry& entry, int from, uint32_t slot) const {
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(from)];
  return peer.own.empty() ? needs_.mesh.worker().counter_value(peer.ours[slot]) : peer.own[slot];
}

absl::StatusOr<uint64_t> Windows::signal_value(const Entry& entry, int from, uint32_t slot) const {
  const Access access{.kind = Kind::kWait, .rank = from, .slot = slot};
  if (absl::Status status = check(entry, access); !status.ok()) return status;
  return value(entry, from, slot);
}

absl::StatusOr<RemoteView> Windows::view(const Entry& entry, int rank) const {
  if (absl::Status status = check(entry, {.kind = Kind::kGet, .rank = rank}); !status.ok()) {
    return status;
  }
  if (rank == static_cast<int>(needs_.mesh.rank())) return RemoteView{entry.data, entry.bytes, {}};
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(rank)];
  if (peer.bytes == 0) return RemoteView{};
  const Mesh::Member& member = needs_.mesh.member(static_cast<uint32_t>(rank));
  absl::StatusOr<RemoteView> view = member.up()
                                        ? needs_.mesh.worker().view(member.peer(), peer.region)
                                        : absl::UnavailableError("it is not connected");
  if (!view.ok()) {
    return absl::Status(
        view.status().code(),
        absl::StrCat("the window of ", member.label, " cannot be mapped here: ",
                     absl::IsNotFound(view.status())
                         ? "that rank has destroyed it"
                         : absl::StrCat(view.status().message(), "; get() copies from it")));
  }
  view->data += peer.offset;
  view->size = peer.bytes;
  return view;
}

// --- under way -----------------------------------------------------------------------------------

bool Windows::has_left(int rank) const {
  if (rank == static_cast<int>(needs_.mesh.rank())) return false;
  const Mesh::Member& member = needs_.mesh.member(static_cast<uint32_t>(rank));
  return member.bye && (member.ended || !member.up());
}

bool Windows::advance_open() {
  bool moved = false;
  unlanded_.assign(needs_.mesh.ranks(), false);
  open_.assign(needs_.mesh.ranks(), false);
  any_open_ = false;
  now_ = needs_.mesh.now();
  size_t kept = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Running& op = *ops_[i];
    moved |= step(op);
    if (op.given_up && !op.transfer) {
      release(op);
      op.entry.reset();
      spare_.push_back(std::move(ops_[i]));
      continue;
    }
    if (op.access.kind != Kind::kWait && op.access.kind != Kind::kFlush) {
      const auto rank = static_cast<size_t>(op.access.rank);
      unlanded_[rank] = unlanded_[rank] || (op.access.kind == Kind::kPut && !op.moved);
      open_[rank] = any_open_ = true;
    }
    std::swap(ops_[kept++], ops_[i]);
  }
  ops_.resize(kept);
  return moved;
}

bool Windows::step(Running& op) {
  const bool landed = op.transfer && op.landed.load(std::memory_order_acquire);
  if (landed) {
    op.transfer = false;
    --transfers_;
    // A peer that is gone is the better reason.
    if (!op.result.ok() && !op.given_up) needs_.mesh.drain();
  }
  if (op.given_up) return landed;
  if (landed && !op.result.ok()) {
    const absl::Status why = about(op.access, op.result);
    if (op.access.kind != Kind::kGet) {
      op.entry->peers[static_cast<size_t>(op.access.rank)].failed.Update(why);
    }
    end(op, why);
    return true;
  }
  if (landed) {
    if (op.access.kind == Kind::kGet && op.copied.data != nullptr) {
      std::memcpy(op.access.local, op.copied.data, op.access.bytes);
    }
    op.moved = true;
  }
  if (op.access.kind == Kind::kWait || op.access.kind == Kind::kFlush) return step_waiting(op);
  if (op.transfer) return false;
  if (op.moved && op.signalled) {
    end(op, absl::OkStatus());
    return true;
  }
  // Puts before this one are under way: its signal waits for their acknowledgements.
  if (op.moved && unlanded_[static_cast<size_t>(op.access.rank)]) return landed;
  return submit(op) || landed;
}

bool Windows::step_waiting(Running& op) {
  const Access& access = op.access;
  bool over = false;
  absl::Status result;
  if (access.kind == Kind::kFlush) {
    over = access.rank == kAnyRank ? !any_open_ : !open_[static_cast<size_t>(access.rank)];
    for (size_t rank = 0; rank < op.entry->peers.size(); ++rank) {
      if (access.rank != kAnyRank && access.rank != static_cast<int>(rank)) continue;
      result.Update(op.entry->peers[rank].failed);
    }
  } else {
    const bool left = has_left(access.rank);  // before the last look at what it did
    over = value(*op.entry, access.rank, access.slot) >= access.value;
    if (!over && left) {
      over = true;
      result = about(access, absl::UnavailableError("that rank has left the group"));
    }
  }
  if (!over && now_ >= op.deadline) {
    over = true;
    result = about(access, absl::DeadlineExceededError(
                               access.kind == Kind::kFlush
                                   ? "the deadline has passed"
                                   : absl::StrFormat("the deadline has passed, and it is %u",
                                                     value(*op.entry, access.rank, access.slot))));
  }
  if (over) end(op, result);
  return over;
}

// False: not now. Otherwise a transfer is under way, or the access has ended.
bool Windows::submit(Running& op) {
  const Access& access = op.access;
  const auto rank = static_cast<uint32_t>(access.rank);
  Entry::Peer& peer = op.entry->peers[rank];
  const Mesh::Member& member = needs_.mesh.member(rank);
  absl::Status status;
  if (access.kind != Kind::kGet && !peer.failed.ok()) {
    status = absl::Status(peer.failed.code(),
                          absl::StrCat("an earlier access has failed: ", peer.failed.message()));
  } else if (member.bye) {
    status = absl::UnavailableError("that rank has left the group");
  } else if (now_ >= op.deadline) {
    status = absl::DeadlineExceededError("the deadline has passed");
  }
  TransferRequest request;
  if (status.ok() && !member.up()) {
    needs_.mesh.want(rank);
    return false;
  }
  if (status.ok() && !op.moved) status = choose_local(op, request);
  if (!status.ok()) {
    end(op, about(access, status));
    return true;
  }
  request.op = access.kind == Kind::kGet ? Op::kRead : Op::kWrite;
  request.peer = member.peer();
  if (!op.moved) {
    request.remote = peer.region;
    request.remote_layout = Layout::contiguous(peer.offset + access.offset, access.bytes);
  }
  const bool signals = !op.signalled && !unlanded_[rank];
  if (signals) {
    request.counter = peer.theirs[access.slot];
    request.increment = access.value;
  }
  request.timeout = op.deadline == kNever ? kNever : op.deadline - now_;
  request.on_end = &Windows::on_end;
  request.context = &op;
  request.detached = true;
  op.landed.store(false, std::memory_order_relaxed);
  absl::StatusOr<TransferId> id = needs_.mesh.worker().submit(request);
  if (absl::IsResourceExhausted(id.status())) return false;
  if (!id.ok()) {
    end(op, about(access, id.status()));
    return true;
  }
  op.id = *id;
  op.transfer = true;
  ++transfers_;
  op.signalled |= signals;
  return true;
}

// Where the wire takes the bytes from, or brings them to.
absl::Status Windows::choose_local(Running& op, TransferRequest& request) {
  const Access& access = op.access;
  const auto lie_in = [&](const MemoryRegion& region) {
    if (region.generation == 0 || access.local < region.base ||
        access.local + access.bytes > region.base + region.size) {
      return false;
    }
    request.local = region;
    request.local_layout =
        Layout::contiguous(static_cast<size_t>(access.local - region.base), access.bytes);
    return true;
  };
  const auto* region = needs_.mesh.memory().find({access.local, access.bytes, 1, 0});
  if (region != nullptr && lie_in(region->local)) return absl::OkStatus();
  if (lie_in(op.entry->region) || lie_in(op.registered)) return absl::OkStatus();
  if (op.copied.data == nullptr && access.bytes <= kMostCopied &&
      !on_device(access.local, access.bytes)) {
    absl::StatusOr<Block> block = needs_.mesh.memory().allocate(access.bytes);
    if (!block.ok()) return block.status();
    op.copied = *block;
    if (access.kind == Kind::kPut) std::memcpy(block->data, access.local, access.bytes);
  }
  if (op.copied.data != nullptr) {
    request.local = op.copied.region;
    request.local_layout = Layout::contiguous(op.copied.offset, access.bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<MemoryRegion> registered =
      needs_.mesh.worker().register_memory(access.local, access.bytes, baton::Access::kLocal);
  if (!registered.ok()) return registered.status();
  op.registered = *registered;
  lie_in(op.registered);
  return absl::OkStatus();
}

void Windows::on_end(void* context, TransferId, const absl::Status& status) {
  auto& op = *static_cast<Running*>(context);
  op.result = status;
  op.landed.store(true, std::memory_order_release);
}

void Windows::end(Running& op, const absl::Status& result) {
  if (std::exchange(op.given_up, true)) return;
  release(op);
  needs_.calls.end_plain(op.work, result);
}

void Windows::release(Running& op) {
  if (op.registered.generation != 0) {
    needs_.mesh.worker().deregister_memory(std::exchange(op.registered, {})).IgnoreError();
  }
  if (op.copied.data != nullptr) needs_.mesh.memory().free(std::exchange(op.copied, {}));
}

// --- failure -------------------------------------------------------------------------------------

void Windows::cancel() {
  for (const auto& op : ops_) {
    op->given_up = true;  // its work ends with all others
    if (op->transfer) needs_.mesh.worker().cancel(op->id).IgnoreError();
  }
}

bool Windows::sources_free(uint32_t rank) const {
  return std::none_of(ops_.begin(), ops_.end(), [&](const auto& op) {
    if (op->access.rank != static_cast<int>(rank) || !op->transfer ||
        op->landed.load(std::memory_order_acquire)) {
      return false;
    }
    const absl::StatusOr<bool> free = needs_.mesh.worker().local_free(op->id);
    return free.ok() && !*free;
  });
}

}  // namespace baton::collectives::internal
