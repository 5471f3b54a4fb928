// A connection that is up: the peer's messages, copying, fences, and how it ends.
#include "transport/shm/connection.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace baton::shm {
namespace {

constexpr int kPacketsAtOnce = 64;
constexpr int kRecordsAtOnce = 64;
constexpr int kSlicesAtOnce = 64;
constexpr size_t kPopulateBytes = 2 << 20;
constexpr uint32_t kSilentRounds = 1 << 14;
// A chunk takes well under 1 ms. A peer that is stopped in one is left behind (Parted).
constexpr Time kClosePatience = std::chrono::milliseconds(40);

// Whether the process at the other end has.
bool ended(const base::UniqueFd& process, const PacketSocket& socket) {
  pollfd end{.fd = process.get(), .events = POLLIN};
  if (process.valid()) return poll(&end, 1, 0) > 0;
  return socket.fd() >= 0 && socket.peer_gone();
}

// Whether the peer has our file open; 0: any.
bool holds(const Lane& in, uint64_t number) {
  return std::any_of(in.opened.begin(), in.opened.end(), [&](const auto& mark) {
    const uint64_t open = mark.load(std::memory_order_seq_cst) & ~Lane::kAskedBack;
    return number == 0 ? open != 0 : open == number;
  });
}

// The peer closes the files that it has open when it gets this.
void ask_back(Lane& in, uint64_t number) {
  for (std::atomic<uint64_t>& mark : in.opened) {
    uint64_t open = mark.load(std::memory_order_seq_cst);
    if (open == 0 || (number != 0 && open != number)) continue;
    mark.compare_exchange_strong(open, open | Lane::kAskedBack, std::memory_order_seq_cst);
  }
}

bool copies(const Parted& peer) {
  return peer.copying != 0 && peer.in->busy.load(std::memory_order_seq_cst) == peer.copying;
}

bool holds_nothing(const Parted& peer) {
  return (!holds(*peer.in, 0) && !copies(peer)) || ended(peer.process, {});
}

absl::Status stopped(const std::string& who, uint32_t region) {
  return absl::UnavailableError(
      absl::StrFormat("%s is stopped in the middle of a copy to or from region %u, which was "
                      "deregistered: end that process before the memory is used again",
                      who, region));
}

absl::Status still_open(const std::string& who) {
  return absl::UnavailableError(
      absl::StrFormat("%s keeps device memory open that was deregistered here: end that process "
                      "before the memory is freed (while it runs, its progress() closes it)",
                      who));
}

}  // namespace

void serve_hot(const Shared& shared) {
  for (Connection* connection : shared.hot) {
    if (connection != nullptr) connection->serve_waiters();
  }
}

Connection::~Connection() { release(); }

std::string Connection::peer_label() const {
  if (peer_.name.empty()) return "the peer";
  return absl::StrFormat("peer %s (pid %d)", peer_.name, peer_pid_);
}

bool Connection::run(EventSink& sink, size_t budget) {
  if (state_ != State::kUp) return false;
  if (bell_owed_) ring_doorbell();
  bool any = receive(sink);
  for (int i = 0; i < kSlicesAtOnce && budget != 0 && state_ == State::kUp; ++i) {
    SliceRunner::Result result = runner_->step(budget);
    if (!result.moved) break;
    any = true;
    if (result.delivered) tell_peer();
    if (result.finished) {
      sink.slice_done(*rail_, result.transfer, result.slice, std::move(result.status));
    }
  }
  if (!any && state_ == State::kUp && shared_.populate && memory_->populating()) {
    memory_->populate(kPopulateBytes);
    any = true;
  }
  return any;
}

void Connection::heat() {
  silent_rounds_ = 0;
  if (std::exchange(hot_, true)) return;
  disarm();
  shared_.hot.push_back(this);
}

bool Connection::cool(bool moved) {
  if (moved || bell_owed_ || state_ != State::kUp || memory_->has_handles()) {
    silent_rounds_ = 0;
    return false;
  }
  if (++silent_rounds_ < kSilentRounds) return false;
  silent_rounds_ = 0;
  if (!arm()) {
    disarm();
    return false;
  }
  hot_ = false;
  return true;
}

bool Connection::receive(EventSink& sink) {
  if (reader_->look()) {
    sink.counters_moved(*rail_);
  } else if (!reader_->pending()) {
    return false;
  }
  Arrival arrival;
  for (int i = 0; i < kRecordsAtOnce && reader_->pending(); ++i) {
    const absl::StatusOr<bool> found = reader_->next(arrival);
    if (!found.ok()) {
      fail(found.status(), sink);
      return true;
    }
    if (*found) sink.arrived(*rail_, arrival);
    if (state_ != State::kUp) return true;
  }
  if (reader_->room_was_awaited()) tell_peer();
  return true;
}

// The peer sets `asleep` and then looks at `activity`; we change `activity` and then look at
// `asleep`, all of it seq_cst: one of the two sees the other.
void Connection::tell_peer() {
  out_->activity.fetch_add(1, std::memory_order_seq_cst);
  if (out_->asleep.load(std::memory_order_seq_cst) == 0) return;
  if (out_->asleep.exchange(0, std::memory_order_seq_cst) == 0) return;
  ring_doorbell();
}

// A doorbell that cannot be sent now is sent in a later round: nothing else might wake the peer. A
// peer that is gone needs none.
void Connection::ring_doorbell() {
  const char doorbell = static_cast<char>(Message::Kind::kDoorbell);
  bell_owed_ = socket_.send({&doorbell, 1}) == PacketSocket::Io::kLater;
  shared_.bell_owed |= bell_owed_;
}

bool Connection::arm() {
  if (state_ == State::kDialing) return shared_.context.clock.now() < dial_at_;
  if (state_ != State::kUp) return true;
  in_->asleep.store(1, std::memory_order_seq_cst);
  const bool populates = shared_.populate && memory_->populating();
  return reader_->quiet() && !populates && !runner_->runnable();
}

void Connection::disarm() {
  if (state_ == State::kUp) in_->asleep.store(0, std::memory_order_relaxed);
}

bool Connection::on_socket(EventSink& sink) {
  if (state_ == State::kDown || state_ == State::kDialing) return false;
  heat();
  if (!out_queue_.empty()) flush();
  Packet packet;
  for (int i = 0; i < kPacketsAtOnce; ++i) {
    const auto io = socket_.receive(packet, /*with_fds=*/state_ != State::kHandshake);
    absl::Status status = io.status();
    if (status.ok()) {
      if (*io == PacketSocket::Io::kLater) break;
      if (*io == PacketSocket::Io::kClosed) {
        peer_closed(/*ended=*/false, sink);
        return true;
      }
      status = on_packet(packet, sink);
    }
    if (!status.ok()) fail(status, sink);
    if (state_ == State::kDown) return true;
  }
  return true;
}

void Connection::on_peer_exit(EventSink& sink) {
  // Messages that the peer sent before can still be read, up to the socket's end.
  for (int i = 0; i < kPacketsAtOnce && state_ != State::kDown && on_socket(sink); ++i) {
    if (!socket_.peer_gone()) break;
  }
  if (state_ != State::kDown) peer_closed(/*ended=*/true, sink);
}

// From here on the peer delivers nothing more. What it has delivered is in our memory, and it has
// it as done: it counts, whatever the connection ends of.
void Connection::drain(EventSink& sink) {
  if (state_ != State::kUp || rail_ == nullptr || std::exchange(draining_, true)) return;
  reader_->close();
  sink.counters_moved(*rail_);  // which the peer may have raised itself, and not come to say so
  for (size_t i = 0; i < Lane::kRingBytes / 8 && state_ == State::kUp; ++i) {
    if (!receive(sink)) break;
  }
}

// `ended`: its process has; else it may have lost this connection only.
void Connection::peer_closed(bool ended, EventSink& sink) {
  drain(sink);
  if (state_ == State::kDown) return;
  if (state_ == State::kHandshake && client_) {
    return fail(absl::UnavailableError("the peer closed the connection during the handshake: does "
                                       "it use the same cluster key?"),
                sink);
  }
  if (!goodbye_.empty()) {
    return fail(absl::AbortedError(peer_label() + " closed the connection: " + goodbye_), sink);
  }
  const std::string what = peer_label() + " died or closed the connection";
  fail(ended ? absl::AbortedError(what) : absl::UnavailableError(what), sink);
}

bool Connection::wait_until_idle(uint32_t busy_value, Time patience) const {
  const auto busy = [&] {
    const uint32_t now = in_->busy.load(std::memory_order_seq_cst);
    return busy_value == 0 ? now != 0 : now == busy_value;
  };
  if (!busy()) return true;
  const Time until = Clock::steady().now() + patience;
  while (busy()) {
    if (ended(pidfd_, socket_)) return true;  // its memory is gone before that is seen
    if (Clock::steady().now() > until) return false;
    sched_yield();
  }
  return true;
}

// Whether no copy between devices that the peer has begun is under way, to or from region mark - 1
// (0: any). A peer that is dying is waited for to its end: the driver lets go of its copies before.
bool Connection::wait_until_copied(uint32_t mark, Time patience) const {
  const auto copying = [&] {
    return std::any_of(in_->copying.begin(), in_->copying.end(), [&](const auto& value) {
      const uint32_t now = value.load(std::memory_order_seq_cst);
      return mark == 0 ? now != 0 : now == mark;
    });
  };
  if (!copying()) return true;
  if (peer_pid_ == getpid()) {  // whose turn to take the mark away may come after this
    if (const auto* devices = internal::device_memory()) devices->wait_for_copies();
    return true;
  }
  const Time until = Clock::steady().now() + patience;
  while (copying()) {
    if (ended(pidfd_, socket_)) return true;
    if (Clock::steady().now() > until) return false;
    serve_hot(shared_);  // it may be waiting for ours
    sched_yield();
  }
  return true;
}

void Connection::serve_waiters() {
  if (!runner_.has_value()) return;
  runner_->settle_devices();
  if (!memory_->asked_back()) return;
  runner_->drop_stale_on_devices();
  memory_->give_back();
}

bool Connection::fenced(uint32_t index) const {
  return state_ != State::kUp ||
         (wait_until_idle(index + 1, Time::zero()) && wait_until_copied(index + 1, Time::zero()));
}

void Connection::ask_back(uint64_t number) {
  if (state_ == State::kUp) shm::ask_back(*in_, number);
}

bool Connection::given_back(uint64_t number) const {
  return state_ != State::kUp || !holds(*in_, number) || ended(pidfd_, socket_);
}

absl::Status Connection::cut_off(std::optional<uint32_t> copying, EventSink& sink) {
  const absl::Status why =
      copying.has_value() ? stopped(peer_label(), *copying) : still_open(peer_label());
  stands_still_ = true;
  fail(why, sink);
  return why;
}

void ask_parted(const Shared& shared, uint64_t number) {
  for (const Parted& peer : shared.parted) ask_back(*peer.in, number);
}

Parted* copying_still(Shared& shared, uint32_t region) {
  for (Parted& peer : shared.parted) {
    if (peer.copying == region + 1 && copies(peer) && !ended(peer.process, {})) return &peer;
  }
  return nullptr;
}

absl::Status tell_copying(Shared& shared, uint32_t region) {
  absl::Status status;
  while (Parted* const peer = copying_still(shared, region)) {
    status.Update(stopped(absl::StrFormat("process %d", peer->pid), region));
    peer->copying = 0;  // the next region of this number is another
  }
  return status;
}

absl::Status wait_for_parted(Shared& shared, uint64_t number, Time until) {
  const auto held = [number](const Parted& peer) {
    return (holds(*peer.in, number) || (number == 0 && copies(peer))) && !ended(peer.process, {});
  };
  ask_parted(shared, number);
  while (std::any_of(shared.parted.begin(), shared.parted.end(), held) &&
         Clock::steady().now() <= until) {
    serve_hot(shared);  // they may be waiting for ours
    sched_yield();
  }
  absl::Status status;
  for (const Parted& peer : shared.parted) {
    if (held(peer)) status.Update(still_open(absl::StrFormat("process %d", peer.pid)));
  }
  std::erase_if(shared.parted, [](const Parted& peer) {
    // The end of a process in another pid namespace would never be noticed.
    return holds_nothing(peer) || (!peer.process.valid() && !copies(peer));
  });
  return status;
}

bool Connection::post(const Slice& slice) {
  if (state_ != State::kUp || !runner_->post(slice)) return false;
  heat();
  return true;
}

bool Connection::write_now(const TransferDescriptor& write, const std::byte* from) {
  bool news = false;
  if (state_ != State::kUp || !runner_->write_now(write, from, news)) return false;
  if (!news) return true;
  tell_peer();
  if (bell_owed_) heat();
  return true;
}

void Connection::abort(TransferId transfer, EventSink& sink) {
  uint32_t slice = 0;
  if (state_ == State::kUp) runner_->stop_on_devices(transfer);
  while (state_ == State::kUp && runner_->take(transfer, slice)) {
    sink.slice_done(*rail_, transfer, slice, absl::CancelledError("cancelled"));
  }
}

absl::Status Connection::reaches(const RemoteRegion& remote) const {
  return state_ == State::kUp ? memory_->reaches(remote) : absl::OkStatus();
}

absl::StatusOr<RemoteView> Connection::view(const RemoteRegion& remote) const {
  if (state_ == State::kUp) return memory_->view(remote);
  return absl::UnavailableError("the connection is not up");
}

absl::Status Connection::maps(const RegionEntry& local, const RemoteRegion& remote) const {
  if (local.place.device < 0) {
    return absl::FailedPreconditionError("no CUDA IPC: the local memory is not of a CUDA device");
  }
  if (state_ != State::kUp) return absl::FailedPreconditionError("the connection is not up");
  return memory_->maps(local.place.device, remote);
}

std::string Connection::about_devices() const {
  return state_ == State::kUp ? memory_->about_devices() : std::string();
}

void Connection::close(const absl::Status& why, EventSink& sink) {
  drain(sink);
  fail(why, sink);
}

void Connection::fail(const absl::Status& why, EventSink& sink) {
  drain(sink);
  if (state_ == State::kDown) return;
  heat();  // for the next round to forget it
  const State before = std::exchange(state_, State::kDown);
  // A lost connection sends no goodbye: one of the two sides redials. The peer may have the new
  // connection up before this side does. A first call that fails is not repeated.
  const bool first_call = client_ && request_.resume == Resume::kNew && before != State::kUp;
  const bool lost = absl::IsUnavailable(why) && !first_call;
  if (!lost && (before == State::kSetup || before == State::kUp)) {
    Message goodbye;
    goodbye.kind = Message::Kind::kGoodbye;
    goodbye.text = std::string(why.message());
    socket_.send(goodbye.encode());  // best effort
  }
  if (before == State::kUp && rail_ != nullptr) {
    TransferId transfer;
    uint32_t slice = 0;
    const absl::Status slices = absl::IsAborted(why) ? absl::UnavailableError(why.message()) : why;
    runner_->finish_on_devices();
    while (rail_ != nullptr && runner_->take_any(transfer, slice)) {
      sink.slice_done(*rail_, transfer, slice, slices);
    }
    release();
    if (rail_ != nullptr) sink.rail_down(*rail_, why);
    return;
  }
  release();
  if (client_) {
    sink.connect_failed(request_.session, why);
  } else {
    sink.handshake_refused(absl::StrFormat("shm process %d", socket_.peer_pid()), why);
  }
}

void Connection::abandon() {
  if (state_ == State::kDown) return;
  heat();
  state_ = State::kDown;
  release();
}

void Connection::rail_destroyed() {
  rail_ = nullptr;
  abandon();
}

// Gives everything back. The peer copies nothing through this connection afterwards.
void Connection::release() {
  if (in_ != nullptr && socket_.fd() >= 0) {
    in_->closed.store(1, std::memory_order_seq_cst);
    const Time patience = stands_still_ ? Time::zero() : kClosePatience;
    if (wait_until_idle(0, patience)) wait_until_copied(0, patience);
  }
  // Skips what was reported when a fence timed out.
  const uint32_t copying =
      in_ == nullptr || stands_still_ ? 0 : in_->busy.load(std::memory_order_seq_cst);
  const bool owed = in_ != nullptr && (peer_pid_ != getpid() || copying != 0);
  // Not left to close(): a child process may hold copies of the descriptors.
  for (const int fd : {socket_.fd(), pidfd_.get()}) {
    if (fd >= 0) epoll_ctl(shared_.epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
  Lane* const in = std::exchange(in_, nullptr);
  out_ = nullptr;
  runner_.reset();
  reader_.reset();
  memory_.reset();
  counters_ = MappedFile();
  // The peer hears of the end when it looks, and closes our handles then. Who has is forgotten now:
  // memory may never be deregistered, and peers come and go.
  std::erase_if(shared_.parted, holds_nothing);
  if (owed) {
    Parted left{std::move(segment_), in, std::move(pidfd_), peer_pid_, copying};
    if (!holds_nothing(left)) shared_.parted.push_back(std::move(left));
  }
  segment_ = MappedFile();
  segment_fd_.reset();
  pidfd_.reset();
  socket_.close();
  out_queue_.clear();
}

}  // namespace baton::shm
