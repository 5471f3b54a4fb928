// Making windows together, and closing them.
#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "collectives/internal/windows.h"
#include "transport/base/log.h"

namespace baton::collectives::internal {
namespace {

// For cancelled transfers to let go of memory, before they are made to.
constexpr Time kMostClosing = std::chrono::milliseconds(100);
constexpr int kTurnsOfClosing = 64;  // of the worker, before the lock is let go of
constexpr uint64_t kOfWindows = 0x77696e646f773032;

constexpr uint32_t kWords = uint32_t{1} << 31;

// A rank's description of its window for each other rank; a CounterId for each signal follows.
struct Invitation {
  uint64_t magic = kOfWindows;
  uint64_t bytes = 0, offset = 0;
  int32_t code = 0;     // of what it failed with; 0: it did not
  uint32_t window = 0;  // its number; with kWords if it takes kAdd
  char region[RemoteRegion::kEncodedBytes] = {};
  char why[176] = {};
};
static_assert(sizeof(Invitation) == 256);
struct Word {
  uint32_t index = 0, generation = 0;
};

}  // namespace

absl::Status Windows::open(Entry& entry, void* data, size_t bytes, bool allocate) {
  entry.owner = this;
  entry.number = next_number_++;
  entries_.push_back(&entry);
  if (entry.words) ++with_words_;
  Worker& worker = needs_.mesh.worker();
  entry.data = static_cast<std::byte*>(data);
  if (allocate) {
    absl::StatusOr<CommBuffer> buffer = needs_.mesh.endpoint().allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    entry.allocated = *buffer;
    entry.data = buffer->data;
  }
  if (bytes > 0 && entry.data == nullptr) {
    return absl::InvalidArgumentError("its memory is null: Window::allocate() makes some");
  }
  entry.bytes = bytes;
  const executor::Memory::Grant* granted =
      bytes == 0 || entry.file.fd >= 0
          ? nullptr
          : needs_.mesh.memory().grant(~reinterpret_cast<uintptr_t>(&entry), entry.data, bytes,
                                       entry.offset);
  if (granted != nullptr) {
    entry.shown = granted->remote;
  } else if (bytes > 0) {
    absl::StatusOr<MemoryRegion> region =
        worker.register_memory(entry.data, bytes, baton::Access::kRemoteReadWrite, entry.file);
    if (!region.ok()) return region.status();
    entry.region = *region;
    absl::StatusOr<RemoteRegion> remote = worker.remote_region(*region);
    if (!remote.ok()) return remote.status();
    entry.shown = *remote;
    entry.offset = 0;
    if (entry.words && region->place.kind == MemoryKind::kDevice)
      copies_.open(region->place.device);
  }
  entry.peers.resize(needs_.mesh.ranks());
  for (uint32_t rank = 0; rank < needs_.mesh.ranks(); ++rank) {
    Entry::Peer& peer = entry.peers[rank];
    peer.added.resize(entry.signals);
    for (uint32_t slot = 0; slot < entry.signals && rank != needs_.mesh.rank(); ++slot) {
      absl::StatusOr<CounterId> counter = worker.allocate_counter();
      if (!counter.ok()) return counter.status();
      peer.ours.push_back(*counter);
    }
  }
  return absl::OkStatus();
}

bool Windows::takes_words(const Entry& entry) const {
  const MemoryPlace& place = entry.region.place;
  return entry.words && reinterpret_cast<uintptr_t>(entry.data) % alignof(uint64_t) == 0 &&
         (place.kind == MemoryKind::kHost || copies_.reaches(place.device));
}

size_t Windows::invitation_bytes(uint32_t signals) {
  return sizeof(Invitation) + signals * sizeof(Word);
}

void Windows::invite(const Entry& entry, uint32_t to, const absl::Status& why,
                     std::byte* out) const {
  Invitation ours;
  ours.bytes = entry.bytes;
  ours.offset = entry.offset;
  ours.code = static_cast<int32_t>(why.code());
  ours.window = entry.number | (takes_words(entry) ? kWords : 0);
  why.message().copy(ours.why, sizeof ours.why - 1);
  if (entry.bytes > 0) entry.shown.encode().copy(ours.region, sizeof ours.region);
  std::memcpy(out, &ours, sizeof ours);
  for (uint32_t slot = 0; slot < entry.signals; ++slot) {
    Word word;
    if (why.ok() && to != needs_.mesh.rank()) {
      const CounterId counter = entry.peers[to].ours[slot];
      word = {counter.index, counter.generation};
    }
    std::memcpy(out + sizeof ours + slot * sizeof word, &word, sizeof word);
  }
}

absl::Status Windows::accept(Entry& entry, uint32_t from, const std::byte* invitation) {
  Invitation theirs;
  std::memcpy(&theirs, invitation, sizeof theirs);
  if (theirs.magic != kOfWindows) {
    return absl::InvalidArgumentError(
        absl::StrCat(label(static_cast<int>(from)),
                     " called all_to_all where this rank makes a window: all ranks must make the "
                     "same calls in the same order"));
  }
  if (theirs.code != 0) {
    theirs.why[sizeof theirs.why - 1] = 0;
    return absl::Status(static_cast<absl::StatusCode>(theirs.code),
                        absl::StrCat(label(static_cast<int>(from)), " could not make its part of ",
                                     "the window: ", theirs.why));
  }
  if (entry.peers.empty()) return absl::OkStatus();  // ours failed
  Entry::Peer& peer = entry.peers[from];
  peer.bytes = theirs.bytes;
  peer.offset = theirs.offset;
  peer.window = theirs.window & ~kWords;
  peer.words = (theirs.window & kWords) != 0;
  if (from == needs_.mesh.rank() || theirs.bytes == 0) {
    peer.region = RemoteRegion{};
  } else {
    absl::StatusOr<RemoteRegion> region =
        RemoteRegion::decode(std::string_view(theirs.region, sizeof theirs.region));
    if (!region.ok()) return region.status();
    if (theirs.offset > region->size || theirs.bytes > region->size - theirs.offset) {
      return absl::InvalidArgumentError(
          absl::StrCat(label(static_cast<int>(from)), " named bytes outside of its memory"));
    }
    peer.region = *region;
  }
  const WorkerUid owner = needs_.mesh.handles()[from].uid();
  for (uint32_t slot = 0; slot < entry.signals; ++slot) {
    Word word;
    std::memcpy(&word, invitation + sizeof theirs + slot * sizeof word, sizeof word);
    peer.theirs.push_back({owner, word.index, static_cast<uint16_t>(word.generation)});
  }
  return absl::OkStatus();
}

// Whether no byte is read or written here for accesses of this window, or out of and into it. What
// still lands at peers lands in windows of theirs, which they close themselves.
bool Windows::let_go(const Entry& of) {
  Worker& worker = needs_.mesh.worker();
  copies_.finish();
  const auto held = [&](const auto& op) {
    return (op->entry.get() == &of || op->local == &of) && holds(*op);
  };
  const auto any = [&] { return std::any_of(ops_.begin(), ops_.end(), held); };
  for (int turn = 0; any(); ++turn) {
    if (turn == kTurnsOfClosing || !worker.progress()) break;
  }
  // By the machine's clock: a test's may stand still.
  if (!any() || Clock::steady().now() < of.close_by) return !any();
  for (const auto& op : ops_) {
    if (held(op)) worker.withdraw(op->id).IgnoreError();
  }
  // A device that still copies: the connection must let go of it.
  for (const auto& op : ops_) {
    if (!held(op)) continue;
    Mesh::Member& member = needs_.mesh.member(static_cast<uint32_t>(op->access.rank));
    if (!std::exchange(member.process->parted, true)) {
      worker.begin_disconnect(member.peer(), Time::zero());
    }
  }
  return !any();
}

bool Windows::close(Entry& entry, const absl::Status& why) {
  if (entry.owner == nullptr) return true;
  if (entry.closed.ok()) {
    entry.closed = absl::FailedPreconditionError(
        absl::StrCat("the window is of no use any more: ", why.message()));
    entry.close_by = Clock::steady().now() + kMostClosing;
    for (const auto& op : ops_) {
      if (closing(*op) && op->transfer) needs_.mesh.worker().cancel(op->id).IgnoreError();
    }
  }
  const uint64_t key = ~reinterpret_cast<uintptr_t>(&entry);
  if (!let_go(entry) || !(entry.region.generation != 0
                              ? needs_.mesh.worker().begin_deregister(entry.region).value_or(true)
                              : needs_.mesh.memory().begin_revoke(key))) {
    return false;
  }
  for (size_t i = 0; i < ops_.size();) {
    Running& op = *ops_[i];
    if (op.entry.get() != &entry && op.local != &entry) {
      ++i;
      continue;
    }
    end(op, absl::Status(why.code(), absl::StrCat(name(op.access), ": ", why.message())));
    release(op);
    leave_way(op);
    transfers_ -= op.transfer ? 1 : 0;
    leave(std::move(ops_[i]));
    ops_.erase(ops_.begin() + static_cast<ptrdiff_t>(i));
  }
  Worker& worker = needs_.mesh.worker();
  const absl::Status fenced = entry.region.generation != 0
                                  ? worker.deregister_memory(entry.region)
                                  : needs_.mesh.memory().revoke_grants(key);
  for (const Entry::Peer& peer : entry.peers) {
    for (const CounterId counter : peer.ours) worker.free_counter(counter).IgnoreError();
  }
  if (!fenced.ok()) {
    base::log_event(base::LogLevel::kWarning,
                    "collectives: %u bytes of a window at %p may still be written to: %s",
                    entry.bytes, static_cast<void*>(entry.data), fenced.message());
  } else if (entry.allocated.data != nullptr) {
    needs_.mesh.endpoint().free(entry.allocated);
  }
  std::erase(entries_, &entry);
  if (entry.words) --with_words_;
  entry.owner = nullptr;
  return true;
}

bool Windows::close_all(const absl::Status& why) {
  while (!entries_.empty()) {
    if (!close(*entries_.back(), why)) return false;
  }
  ways_.clear();  // the next group may number other ranks so
  return true;
}

void Windows::pause_closing() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

}  // namespace baton::collectives::internal
