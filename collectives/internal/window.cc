// The public windows: made together by all ranks, and handed to the communicator's.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/internal/communicator_impl.h"
#include "collectives/internal/windows.h"
#include "collectives/window.h"
#include "transport/base/threads/forks.h"

namespace baton {

using collectives::internal::Windows;

struct Window::Made {
  Made(Communicator::Impl& of, std::shared_ptr<Windows::Entry> made)
      : impl(of), endpoint(of.endpoint), mutex(of.mutex), entry(std::move(made)) {}

  Communicator::Impl& impl;  // while `entry` has an owner
  const std::shared_ptr<Endpoint> endpoint;
  std::mutex& mutex;  // the endpoint's
  const std::shared_ptr<Windows::Entry> entry;
  const base::MadeHere made_here;
  // While it is made: how this rank's part went, and what all tell each other.
  absl::Status own;
  size_t each = 0;
  std::vector<std::byte> in, out;

  // body(windows), under the lock, or why there is no use in it.
  template <typename Body>
  std::invoke_result_t<Body, Windows&> with(Body&& body) const {
    if (made_here.elsewhere()) {
      return absl::InvalidArgumentError(
          "the window belongs to the process that this one was forked from: make another one");
    }
    std::lock_guard lock(mutex);
    if (!entry->closed.ok()) return entry->closed;
    return body(*entry->owner);
  }
  absl::StatusOr<Work> start(const Windows::Access& access, const CallOptions& options) const {
    return with([&](Windows& windows) {
      absl::StatusOr<Work> work = windows.start(entry, access, options);
      if (work.ok() && !options.more && windows.wants_turn()) impl.driver->call_started();
      return work;
    });
  }
};

Window::Window(std::unique_ptr<Made> made) : made_(std::move(made)) {}

Window::~Window() {
  if (made_->made_here.elsewhere()) return;
  Windows::Entry& entry = *made_->entry;
  const absl::Status why = absl::AbortedError("the window was destroyed");
  for (std::unique_lock lock(made_->mutex);
       entry.owner != nullptr && !entry.owner->close(entry, why); lock.lock()) {
    lock.unlock();
    Windows::pause_closing();
  }
}

absl::StatusOr<std::unique_ptr<Window>> Window::create(Communicator& comm, void* data, size_t bytes,
                                                       WindowOptions options) {
  return make(comm, data, bytes, false, options);
}

absl::StatusOr<std::unique_ptr<Window>> Window::allocate(Communicator& comm, size_t bytes,
                                                         WindowOptions options) {
  return make(comm, nullptr, bytes, true, options);
}

absl::StatusOr<std::unique_ptr<Window>> Window::begin(Communicator& comm, void* data, size_t bytes,
                                                      bool allocate, const WindowOptions& options,
                                                      Work& work) {
  if (options.signals > kMostSignals || (options.signals == 0 && !options.words)) {
    return absl::InvalidArgumentError(absl::StrCat("a window has 1 to ", kMostSignals,
                                                   " signals from each rank, or words, not ",
                                                   options.signals));
  }
  Communicator::Impl& impl = *comm.impl_;
  const auto entry = std::make_shared<Windows::Entry>();
  entry->signals = options.signals;
  entry->words = options.words;
  entry->file = options.file;
  std::unique_ptr<Window> window(new Window(std::make_unique<Made>(impl, entry)));
  Made& made = *window->made_;
  made.each = Windows::invitation_bytes(options.signals);
  {
    std::lock_guard lock(impl.mutex);
    if (!impl.failure.broken().ok()) return impl.failure.broken();
    made.own = impl.windows->open(*entry, data, bytes, allocate);
    made.in.resize(impl.mesh.ranks() * made.each);
    made.out.resize(made.in.size());
    for (uint32_t rank = 0; rank < impl.mesh.ranks(); ++rank) {
      impl.windows->invite(*entry, rank, made.own, made.in.data() + rank * made.each);
    }
  }
  CallOptions call;
  call.timeout = options.timeout;
  const auto started =
      comm.all_to_all_async(made.in.data(), made.out.data(), made.each, DataType::kU8, call);
  if (!started.ok()) return started.status();
  work = *started;
  return window;
}

absl::Status Window::finish() {
  return made_->with([&](Windows& windows) {
    absl::Status status = made_->own;
    for (uint32_t rank = 0; rank * made_->each < made_->out.size(); ++rank) {
      status.Update(windows.accept(*made_->entry, rank, made_->out.data() + rank * made_->each));
    }
    return status;
  });
}

absl::StatusOr<std::unique_ptr<Window>> Window::make(Communicator& comm, void* data, size_t bytes,
                                                     bool allocate, const WindowOptions& options) {
  Work work;
  auto window = begin(comm, data, bytes, allocate, options, work);
  if (!window.ok()) return window;
  absl::Status status = comm.wait(work);
  if (status.ok()) status = (*window)->finish();
  if (!status.ok()) return status;
  return window;
}

std::byte* Window::data() const { return made_->entry->data; }
size_t Window::bytes() const { return made_->entry->bytes; }
size_t Window::bytes(int rank) const {
  const auto& peers = made_->entry->peers;
  return rank < 0 || static_cast<size_t>(rank) >= peers.size()
             ? 0
             : peers[static_cast<size_t>(rank)].bytes;
}
uint32_t Window::signals() const { return made_->entry->signals; }

absl::StatusOr<Work> Window::put(const void* from, size_t bytes, int to, size_t offset,
                                 const CallOptions& options) {
  auto* const local = static_cast<std::byte*>(const_cast<void*>(from));
  return made_->start({Windows::Access::Kind::kPut, local, bytes, to, offset}, options);
}

absl::StatusOr<Work> Window::put_signal(const void* from, size_t bytes, int to, size_t offset,
                                        uint32_t slot, uint64_t add, const CallOptions& options) {
  if (add == 0) return absl::InvalidArgumentError("put_signal: a signal adds 1 at least");
  auto* const local = static_cast<std::byte*>(const_cast<void*>(from));
  return made_->start({Windows::Access::Kind::kPut, local, bytes, to, offset, slot, add}, options);
}

absl::StatusOr<Work> Window::put_rows(const void* from, const WindowRows& rows, int to,
                                      size_t offset, uint32_t slot, uint64_t add,
                                      const CallOptions& options) {
  if (!rows.to.empty() && rows.to.size() != rows.from.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("put_rows: ", rows.from.size(), " rows have ", rows.to.size(), " places"));
  }
  auto* const local = static_cast<std::byte*>(const_cast<void*>(from));
  Windows::Access access{
      Windows::Access::Kind::kPut, local, rows.from.size() * rows.row_bytes, to, offset, slot, add};
  if (access.bytes > 0) access.rows = rows;
  return made_->start(access, options);
}

absl::StatusOr<Work> Window::put_add(const void* from, size_t bytes, int to, size_t offset,
                                     const WindowWord& word, const CallOptions& options) {
  Windows::Access access{Windows::Access::Kind::kPut,
                         static_cast<std::byte*>(const_cast<void*>(from)), bytes, to, offset};
  access.value = word.add;
  access.words = word.window.made_->entry.get();
  access.word_offset = word.offset;
  access.adds = true;
  access.behind_puts = word.behind_earlier_puts;
  return made_->start(access, options);
}

absl::StatusOr<Work> Window::get(void* out, size_t bytes, int from, size_t offset,
                                 const CallOptions& options) {
  return made_->start(
      {Windows::Access::Kind::kGet, static_cast<std::byte*>(out), bytes, from, offset}, options);
}

absl::StatusOr<Work> Window::signal(int to, uint32_t slot, uint64_t add,
                                    const CallOptions& options) {
  return made_->start({Windows::Access::Kind::kSignal, nullptr, 0, to, 0, slot, add}, options);
}

absl::StatusOr<Work> Window::wait_signal(int from, uint32_t slot, uint64_t value,
                                         const CallOptions& options) {
  return made_->start({Windows::Access::Kind::kWait, nullptr, 0, from, 0, slot, value}, options);
}

absl::StatusOr<Work> Window::flush(int to, const CallOptions& options) {
  return made_->start({Windows::Access::Kind::kFlush, nullptr, 0, to}, options);
}

absl::StatusOr<uint64_t> Window::signal_value(int from, uint32_t slot) const {
  return made_->with(
      [&](Windows& windows) { return windows.signal_value(*made_->entry, from, slot); });
}

absl::StatusOr<RemoteView> Window::view(int rank) const {
  return made_->with([&](Windows& windows) { return windows.view(*made_->entry, rank); });
}

}  // namespace baton

namespace baton::collectives::internal {

// An access to a window: what it reaches, its name in messages, and what is refused.

size_t Windows::Access::reach() const {
  if (rows.from.empty()) return bytes;
  const size_t last = *std::max_element(rows.from.begin(), rows.from.end());
  return last * rows.from_stride + rows.row_bytes;
}

size_t Windows::Access::remote_reach() const {
  if (rows.to.empty()) return bytes;
  const size_t last = *std::max_element(rows.to.begin(), rows.to.end());
  return last * rows.to_stride + rows.row_bytes;
}

Layout Windows::Access::local_layout(size_t base) const {
  if (rows.from.empty()) return Layout::contiguous(base, bytes);
  return Layout::paged(base, rows.from, rows.from_stride, rows.row_bytes);
}

Layout Windows::Access::remote_layout(size_t base) const {
  if (rows.to.empty()) return Layout::contiguous(base, bytes);
  return Layout::paged(base, rows.to, rows.to_stride, rows.row_bytes);
}

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
        "the window has %u signals (WindowOptions::signals): use a lower slot", entry.signals));
  }
  const uint64_t before = access.kind == Kind::kWait
                              ? 0
                              : entry.peers[static_cast<size_t>(access.rank)].added[access.slot];
  if (access.value <= CounterTable::kMaxValue - before) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "adding %u to the %u that this rank added before exceeds a signal's limit, 2^48 - 1",
      access.value, before));
}

absl::Status Windows::check_word(const Access& access) const {
  if (access.words == nullptr || access.words->owner != this || !access.words->closed.ok()) {
    return absl::InvalidArgumentError("the window of the word is not one of this communicator");
  }
  const Entry::Peer& peer = access.words->peers[static_cast<size_t>(access.rank)];
  if (peer.bytes < sizeof(uint64_t) || access.word_offset > peer.bytes - sizeof(uint64_t)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "there is no word at %u: that rank's window has %u bytes", access.word_offset, peer.bytes));
  }
  if (access.word_offset % sizeof(uint64_t) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the word at %u is not aligned to 8", access.word_offset));
  }
  if (peer.words) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "that rank cannot add to words of that window: it was made without WindowOptions::words, or "
      "its memory is not aligned to 8, or is device memory that the CPU cannot copy to");
}

absl::Status Windows::check(const Entry& entry, const Access& access) const {
  if (access.kind == Kind::kFlush && access.rank == kAnyRank) return absl::OkStatus();
  if (access.rank < 0 || access.rank >= static_cast<int>(needs_.mesh.ranks())) {
    return absl::InvalidArgumentError(
        absl::StrFormat("rank %d: there are %u ranks", access.rank, needs_.mesh.ranks()));
  }
  absl::Status status;
  if (access.adds) {
    status = check_word(access);
  } else if (access.kind == Kind::kPut ? access.value > 0
                                       : access.kind != Kind::kFlush && access.kind != Kind::kGet) {
    status = check_slot(entry, access);
  }
  const Entry::Peer& peer = entry.peers[static_cast<size_t>(access.rank)];
  const size_t reach = access.remote_reach();
  if (reach > peer.bytes || access.offset > peer.bytes - reach) {
    status =
        absl::InvalidArgumentError(absl::StrFormat("that rank's window has %u bytes", peer.bytes));
  } else if (access.bytes > 0 && access.local == nullptr) {
    status = absl::InvalidArgumentError("the local memory is null");
  } else if (access.kind == Kind::kSignal && access.value == 0) {
    status = absl::InvalidArgumentError("a signal adds 1 at least");
  } else if (access.bytes > 0 && access.rank == static_cast<int>(needs_.mesh.rank())) {
    for (const std::byte* data : {access.local, entry.data + access.offset}) {
      const int device = device_of(data, access.bytes);
      if (device < 0 || (copies_.reaches(device) && access.rows.from.empty())) continue;
      status = absl::UnimplementedError(
          "a rank's access to its own window on a device: copy with the device's own means");
    }
  }
  return status.ok() ? status : about(access, status);
}

}  // namespace baton::collectives::internal
