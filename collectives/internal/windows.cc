// Accesses to windows: their transfers, and what a signal waits for.
#include "collectives/internal/windows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {
namespace {

// Local memory of so few bytes is copied: to register it for one access would take longer.
constexpr size_t kMostCopied = 4096;

// The body of kAdd.
struct WordAdd {
  uint32_t window = 0, unused = 0;
  uint64_t offset = 0, value = 0;
};
static_assert(sizeof(WordAdd) == 24);

}  // namespace

absl::StatusOr<Work> Windows::start(const std::shared_ptr<Entry>& entry, const Access& access,
                                    const CallOptions& options) {
  if (!needs_.failure.broken().ok()) return needs_.failure.broken();
  if (absl::Status status = check(*entry, access); !status.ok()) return status;
  absl::StatusOr<Work> work = needs_.calls.start_plain(&options);
  if (!work.ok()) return work;
  const bool writes = access.kind == Kind::kPut || access.kind == Kind::kSignal;
  if (writes && !access.adds && access.value > 0) {
    entry->peers[static_cast<size_t>(access.rank)].added[access.slot] += access.value;
  }
  const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(access.rank)) << 32 |
                       static_cast<uint32_t>(options.tag);
  if (access.kind != Kind::kWait && access.kind != Kind::kFlush) {
    if (access.rank == static_cast<int>(needs_.mesh.rank())) {
      needs_.calls.end_plain(*work, access_own(*entry, access));
      return work;
    }
    if (over_at_once(*entry, access, key)) {
      needs_.calls.end_plain(*work, absl::OkStatus());
      return work;
    }
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
  op->signalled =
      access.kind == Kind::kGet || (access.kind == Kind::kPut && access.value == 0 && !access.adds);
  op->transfer = op->given_up = false;
  op->local = nullptr;
  if (access.adds) op->access.slot = access.words->peers[static_cast<size_t>(access.rank)].window;
  op->way = nullptr;
  if (writes) {
    auto& way = ways_[key];
    if (way == nullptr) way = std::make_unique<Way>(Way{.key = key});
    ++way->open;
    op->way = way.get();
  }
  ops_.push_back(std::move(op));
  return work;
}

void Windows::leave_way(Running& op) {
  Way* const way = std::exchange(op.way, nullptr);
  if (way != nullptr && --way->open == 0 && way->failed.ok()) ways_.erase(way->key);
}

// A small put or a signal to memory that is mapped here, where none that it may have to come behind
// is open.
bool Windows::over_at_once(Entry& entry, const Access& access, uint64_t way) {
  if (access.kind == Kind::kGet || access.adds || access.bytes > kMostCopied ||
      !access.rows.from.empty()) {
    return false;
  }
  const auto rank = static_cast<uint32_t>(access.rank);
  const Mesh::Member& member = needs_.mesh.member(rank);
  const Entry::Peer& peer = entry.peers[rank];
  if (!member.up() || member.bye || needs_.failure.lost()[rank] || !peer.failed.ok()) return false;
  if (const auto open = ways_.find(way); open != ways_.end() && open->second->open > 0)
    return false;
  if (device_of(access.local, access.bytes) >= 0) return false;
  return needs_.mesh.worker().write_now(
      member.peer(), access.local, access.bytes, peer.region, peer.offset + access.offset,
      access.value > 0 ? peer.theirs[access.slot] : RemoteCounter(), access.value);
}

absl::Status Windows::access_own(Entry& entry, const Access& access) {
  const bool puts = access.kind == Kind::kPut;
  std::byte* const place = entry.data + access.offset;
  std::byte* const word = access.adds ? access.words->data + access.word_offset : nullptr;
  if (!access.rows.from.empty()) {
    const WindowRows& rows = access.rows;
    for (size_t i = 0; i < rows.from.size(); ++i) {
      std::memmove(place + (rows.to.empty() ? i * rows.row_bytes : rows.to[i] * rows.to_stride),
                   access.local + rows.from[i] * rows.from_stride, rows.row_bytes);
    }
  }
  const size_t bytes = access.rows.from.empty() ? access.bytes : 0;
  const WindowCopies::Job::Place there{place, on_device(entry)};
  const WindowCopies::Job::Place here{access.local, device_of(access.local, bytes) >= 0};
  absl::Status status;
  const WindowCopies::Job job{
      .from = puts ? here : there,
      .to = puts ? there : here,
      .bytes = bytes,
      .word = {word, access.adds && on_device(*access.words)},
      .add = access.value,
      .on_end = [](void* of, const absl::Status& why) { *static_cast<absl::Status*>(of) = why; },
      .context = &status};
  if (job.from.on_device || job.to.on_device || job.word.on_device) {
    copies_.start(job);  // what others have added comes first
    copies_.finish();
    return status;
  }
  if (bytes > 0) std::memmove(job.to.data, job.from.data, access.bytes);
  if (word != nullptr) WindowCopies::add(word, access.value);
  return absl::OkStatus();
}

void Windows::added_on_device(void* context, const absl::Status& status) {
  auto& windows = *static_cast<Windows*>(context);
  if (!status.ok()) windows.needs_.failure.fail(status, windows.needs_.mesh.rank());
}

absl::Status Windows::on_add(std::string_view body) {
  WordAdd add_to;
  if (body.size() != sizeof add_to) {
    return absl::InvalidArgumentError("a message that adds to a word has a wrong size");
  }
  std::memcpy(&add_to, body.data(), sizeof add_to);
  const auto found =
      std::lower_bound(entries_.begin(), entries_.end(), add_to.window,
                       [](const Entry* entry, uint32_t number) { return entry->number < number; });
  // Destroyed here while the message was on its way.
  if (found == entries_.end() || (*found)->number != add_to.window) return absl::OkStatus();
  Entry& entry = **found;
  if (!takes_words(entry) || add_to.offset % sizeof(uint64_t) != 0 ||
      entry.bytes < sizeof(uint64_t) || add_to.offset > entry.bytes - sizeof(uint64_t)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("it adds to a word at %u of a window with %u bytes and %s", add_to.offset,
                        entry.bytes, takes_words(entry) ? "words" : "no words"));
  }
  std::byte* const word = entry.data + add_to.offset;
  if (on_device(entry)) {
    copies_.start({.word = {word, true},
                   .add = add_to.value,
                   .on_end = &Windows::added_on_device,
                   .context = this});
  } else {
    WindowCopies::add(word, add_to.value);
  }
  return absl::OkStatus();
}

uint64_t Windows::value(const Entry& entry, int from, uint32_t slot) const {
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(from)];
  return peer.ours.empty() ? peer.added[slot] : needs_.mesh.worker().counter_value(peer.ours[slot]);
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
  return needs_.failure.lost()[static_cast<size_t>(rank)] ||
         (member.bye && (member.ended || !member.up()));
}

bool Windows::advance_open() {
  bool moved = false;
  ++round_;
  open_.assign(needs_.mesh.ranks(), false);
  any_open_ = false;
  now_ = needs_.mesh.now();
  size_t kept = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Running& op = *ops_[i];
    moved |= step(op);
    if (op.given_up && !op.transfer) {
      release(op);
      leave_way(op);
      op.entry.reset();
      spare_.push_back(std::move(ops_[i]));
      continue;
    }
    if (op.access.kind != Kind::kWait && op.access.kind != Kind::kFlush) {
      if (op.access.kind == Kind::kPut && !op.moved) op.way->unlanded_in = round_;
      const auto rank = static_cast<size_t>(op.access.rank);
      open_[rank] = open_[rank] || !op.given_up;
      any_open_ = any_open_ || !op.given_up;
    }
    std::swap(ops_[kept++], ops_[i]);
  }
  ops_.resize(kept);
  return moved;
}

bool Windows::step(Running& op) {
  const bool landed = op.transfer && op.landed();
  if (landed) {
    op.transfer = false;
    --transfers_;
    // A peer that is gone is the better reason.
    if (!op.result.ok() && !op.given_up) needs_.mesh.drain();
  }
  if (op.given_up || closing(op)) return landed;
  if (landed && !op.result.ok()) {
    fail(op, op.result);
    return true;
  }
  if (landed) {
    if (op.access.kind == Kind::kGet && op.copied.data != nullptr) {
      std::memcpy(op.access.local, op.copied.data, op.access.bytes);
    }
    op.moved = true;
  }
  if (op.access.kind == Kind::kWait || op.access.kind == Kind::kFlush) return step_waiting(op);
  if (op.transfer) {
    // A rank that does not answer by then no longer delays the return of this rank's memory.
    if (now_ < op.deadline || !needs_.mesh.worker().local_free(op.id).value_or(false)) return false;
    fail(op, absl::DeadlineExceededError("the deadline has passed"));
    return true;
  }
  if (op.moved && op.signalled) {
    end(op, absl::OkStatus());
    return true;
  }
  // Puts before this one are under way: its signal waits for their acknowledgements, until its time
  // is over or one of them has failed.
  if (op.moved && !may_signal(op) && now_ < op.deadline && failed_before(op).ok()) return landed;
  return submit(op) || landed;
}

bool Windows::may_signal(const Running& op) const {
  return !op.access.behind_puts || op.way->unlanded_in != round_;
}

// How an access that this one comes behind has failed.
absl::Status Windows::failed_before(const Running& op) const {
  if (op.access.kind == Kind::kGet) return absl::OkStatus();
  absl::Status failed = op.entry->peers[static_cast<size_t>(op.access.rank)].failed;
  if (op.access.adds && op.access.behind_puts) failed.Update(op.way->failed);
  return failed;
}

bool Windows::step_waiting(Running& op) {
  const Access& access = op.access;
  bool over = false;
  absl::Status result;
  if (access.kind == Kind::kFlush) {
    over = access.rank == kAnyRank ? !any_open_ : !open_[static_cast<size_t>(access.rank)];
    for (size_t rank = 0; rank < op.entry->peers.size(); ++rank) {
      if (access.rank != kAnyRank && access.rank != static_cast<int>(rank)) continue;
      Entry::Peer& peer = op.entry->peers[rank];
      result.Update(peer.failed);
      if (over) result.Update(std::exchange(peer.failed_get, absl::OkStatus()));
    }
  } else {
    const bool left = has_left(access.rank);  // before the last look at what it did
    over = value(*op.entry, access.rank, access.slot) >= access.value;
    if (!over && left) {
      over = true;
      result = about(access, absl::UnavailableError("that rank has left the group, or is gone"));
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
  if (absl::Status failed = failed_before(op); !failed.ok()) {
    status = absl::Status(failed.code(),
                          absl::StrCat("an earlier access has failed: ", failed.message()));
  } else if (member.bye || needs_.failure.lost()[rank]) {
    status =
        absl::UnavailableError(member.bye ? "that rank has left the group" : "that rank is gone");
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
    fail(op, status);
    return true;
  }
  request.op = access.kind == Kind::kGet ? Op::kRead : Op::kWrite;
  request.peer = member.peer();
  if (!op.moved) {
    request.remote = peer.region;
    request.remote_layout = access.remote_layout(peer.offset + access.offset);
  }
  const bool signals = !op.signalled && may_signal(op);
  std::array<char, EndpointImpl::kHeadBytes + sizeof(WordAdd)> message;
  if (signals && access.adds) {
    const WordAdd body{.window = access.slot, .offset = access.word_offset, .value = access.value};
    EndpointImpl::write_head(needs_.mesh.id(), ControlMessage::kAdd, message.data());
    std::memcpy(message.data() + EndpointImpl::kHeadBytes, &body, sizeof body);
    request.notify = {message.data(), message.size()};
  } else if (signals) {
    request.counter = peer.theirs[access.slot];
    request.increment = access.value;
  }
  request.timeout = op.deadline == kNever ? kNever : op.deadline - now_;
  request.on_end = &Windows::on_end;
  request.context = &op;
  request.detached = true;
  op.fate.store(Running::Fate::kUnderWay, std::memory_order_relaxed);
  absl::StatusOr<TransferId> id = needs_.mesh.worker().submit(request);
  if (absl::IsResourceExhausted(id.status())) return false;
  if (!id.ok()) {
    fail(op, id.status());
    return true;
  }
  op.id = *id;
  op.transfer = true;
  ++transfers_;
  op.signalled |= signals;
  return true;
}

// Chooses the local memory that the transfer reads or writes.
absl::Status Windows::choose_local(Running& op, TransferRequest& request) {
  const Access& access = op.access;
  const size_t reach = access.reach();
  const auto lie_in = [&](const MemoryRegion& region) {
    if (region.generation == 0 || access.local < region.base ||
        access.local + reach > region.base + region.size) {
      return false;
    }
    request.local = region;
    request.local_layout = access.local_layout(static_cast<size_t>(access.local - region.base));
    return true;
  };
  const auto* region = needs_.mesh.memory().find({access.local, reach, 1, 0});
  if (region != nullptr && lie_in(region->local)) return absl::OkStatus();
  if (lie_in(op.entry->region) || lie_in(op.registered)) return absl::OkStatus();
  for (const Entry* entry : entries_) {
    if (!entry->closed.ok() || !lie_in(entry->region)) continue;
    op.local = entry;
    return absl::OkStatus();
  }
  if (op.copied.data == nullptr && access.rows.from.empty() && access.bytes <= kMostCopied &&
      device_of(access.local, access.bytes) < 0) {
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
      needs_.mesh.worker().register_memory(access.local, reach, baton::Access::kLocal);
  if (!registered.ok()) return registered.status();
  op.registered = *registered;
  lie_in(op.registered);
  return absl::OkStatus();
}

void Windows::on_end(void* context, TransferId, const absl::Status& status) {
  auto& op = *static_cast<Running*>(context);
  op.result = status;
  if (op.fate.exchange(Running::Fate::kLanded) == Running::Fate::kLeft) delete &op;
}

void Windows::leave(std::unique_ptr<Running> op) {
  Running* const left = op.release();
  if (!left->transfer || left->fate.exchange(Running::Fate::kLeft) == Running::Fate::kLanded) {
    delete left;
  }
}

// Later accesses to that rank fail too.
void Windows::fail(Running& op, const absl::Status& why) {
  Entry::Peer& peer = op.entry->peers[static_cast<size_t>(op.access.rank)];
  const absl::Status said = about(op.access, why);
  (op.access.kind == Kind::kGet ? peer.failed_get : peer.failed).Update(said);
  if (op.access.kind != Kind::kGet) op.way->failed.Update(said);
  end(op, said);
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

// Local memory is read or written for it.
bool Windows::holds(const Running& op) const {
  if (!op.transfer || op.landed()) return false;
  const absl::StatusOr<bool> free = needs_.mesh.worker().local_free(op.id);
  return free.ok() && !*free;
}

bool Windows::sources_free(uint32_t rank) const {
  return std::none_of(ops_.begin(), ops_.end(), [&](const auto& op) {
    return op->access.rank == static_cast<int>(rank) && holds(*op);
  });
}

void Windows::withdraw(uint32_t rank) {
  for (const auto& op : ops_) {
    if (op->access.rank != static_cast<int>(rank) || !holds(*op)) continue;
    needs_.mesh.worker().withdraw(op->id).IgnoreError();
  }
}

}  // namespace baton::collectives::internal
