// A tcp rail's life: taking slices, aborting, watching for a stall, going down.
#include "transport/tcp/rail.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::tcp {

void IndexQueue::remove(uint8_t item) {
  size_t kept = 0;
  for (size_t i = 0; i < count_; ++i) {
    const uint8_t at = items_[(head_ + i) % kCapacity];
    if (at != item) items_[(head_ + kept++) % kCapacity] = at;
  }
  count_ = kept;
}

TcpRail::TcpRail(std::shared_ptr<TcpShared> shared, int fd, const HelloInfo& peer)
    : shared_(std::move(shared)), rx_(shared_->nowhere.get()) {
  io_.fd = fd;
  const Endpoint remote = peer_of(fd);
  peer_ = absl::StrCat(peer.name.empty() ? "?" : peer.name, " (", remote.text(), ")");
  batched_.reserve(kDepth);
  wire_pieces_.resize(kMaxPieces);
  mapped_.resize(kMaxPieces);
  control_.reserve(64 * kHeaderBytes);
}

absl::StatusOr<std::unique_ptr<TcpRail>> TcpRail::create(std::shared_ptr<TcpShared> shared, int fd,
                                                         const HelloInfo& peer, int sockets) {
  std::unique_ptr<TcpRail> rail(new TcpRail(std::move(shared), fd, peer));
  TcpShared& all = *rail->shared_;
  const Endpoint remote = peer_of(fd);
  const std::string congestion = tune(fd, remote, all.socket_options);
  rail->properties_ = {
      .provider = "tcp",
      .route = absl::StrFormat("tcp %s (%s, %d socket%s, %s)", remote.text(), congestion, sockets,
                               sockets == 1 ? "" : "s", all.engine->name()),
      .bytes_per_second = 2e9,
      .slice_bytes = all.slice_bytes,
      .depth = kDepth};
  absl::Status status = all.engine->attach(rail->io_);
  if (!status.ok()) return status;
  all.rails.push_back(rail.get());
  return rail;
}

TcpRail::~TcpRail() { release_socket(); }

bool TcpRail::post(const Slice& slice, EventSink& sink) {
  if (closed_ || failing_) return false;
  if (slice.begin == slice.end && slice.transfer->op == Op::kRead) {
    sink.slice_done(*this, slice.transfer->id, slice.index, absl::OkStatus());
    return true;
  }
  Slot* slot = slots_.take(slice);
  if (slot == nullptr) return false;
  (slot->op == Op::kWrite ? writes_of(*slot) : reads_).push(slots_.number_of(*slot));
  return true;
}

void TcpRail::abort(TransferId transfer, EventSink& sink) {
  for (uint8_t at = 0; at < kDepth && !closed_; ++at) {
    Slot& slot = slots_[at];
    if (!slot.live || slot.aborted || !(slot.id == transfer)) continue;
    if (slot.op == Op::kWrite) {
      slot.aborted = true;
      if (slot.begun) {
        // What is on the wire may land until the target has spoken: wait for that, for a while.
        last_moved_ = shared_->context.clock.now();
        next_check_ = Time::zero();
        continue;
      }
      writes_of(slot).remove(at);
    } else {
      reads_.remove(at);
      if (landing_slot_ == at) {
        shared_->engine->stop_receive(io_);
        rx_.discard();
        landing_slot_ = -1;
      }
      if (slot.reads_open > 0) {
        auto zombie = std::find_if(zombies_.begin(), zombies_.end(),
                                   [](const Zombie& z) { return z.reads_open == 0; });
        *zombie = {slot.id, slot.slice, slot.reads_open};  // there are as many as open reads
        put_control({.type = FrameType::kCancelRead, .transfer = slot.id, .slice = slot.slice});
      }
    }
    report(slot, absl::CancelledError("aborted"), sink);
  }
}

void TcpRail::close(absl::Status why, EventSink& sink) {
  fail(std::move(why));
  if (!inside_) finish(sink);
}

void TcpRail::fail(absl::Status why) {
  if (failing_) return;
  failing_ = true;
  failure_ = std::move(why);
}

absl::Status TcpRail::lost(std::string_view why) const {
  return absl::UnavailableError(absl::StrCat("peer ", peer_, " over tcp: ", std::string(why)));
}

void TcpRail::release_socket() {
  if (io_.fd < 0) return;
  // Where anything is under way the kernel must forget it at once; an idle connection ends
  // politely.
  if (waiting() || failing_) {
    const linger at_once{.l_onoff = 1, .l_linger = 0};
    setsockopt(io_.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  shared_->engine->detach(io_);
  ::close(io_.fd);
  io_.fd = -1;
  std::replace(shared_->rails.begin(), shared_->rails.end(), this, static_cast<TcpRail*>(nullptr));
}

void TcpRail::finish(EventSink& sink) {
  if (closed_) return;
  closed_ = true;
  next_check_ = kNever;
  release_socket();
  if (failure_.ok()) failure_ = absl::CancelledError("closed");
  for (Slot& slot : slots_) {
    if (slot.live) report(slot, failure_, sink);
  }
  sink.rail_down(*this, failure_);
}

bool TcpRail::advance(EventSink& sink) {
  if (closed_) return false;
  bool any = false;
  inside_ = true;
  if (io_.tx.done) {
    io_.tx.done = false;
    any = true;
    on_sent(io_.tx.result);
  }
  if (io_.rx.done) {
    io_.rx.done = false;
    any = true;
    on_received(io_.rx.result, sink);
  }
  if (!failing_ && !io_.tx.busy && !io_.tx.done) compose();
  // A peer that sends but takes no answers is not read from until it does.
  if (!failing_ && !io_.rx.busy && !io_.rx.done && control_.size() < TxBatch::kArenaBytes) {
    rx_.fill(io_.rx.message);
    shared_->engine->receive(io_);
  }
  inside_ = false;
  if (failing_) finish(sink);
  return any;
}

bool TcpRail::runnable() const {
  if (closed_) return false;
  if (failing_ || io_.tx.done || io_.rx.done) return true;
  return !io_.tx.busy && (!control_.empty() || !writes_.empty() || !urgent_.empty() ||
                          !answers_.empty() || (!reads_.empty() && reads_open_ < kMaxReads));
}

// Whether anything is under way in either direction that needs the peer to move on.
bool TcpRail::waiting() const {
  return slots_.live() > 0 || reads_open_ > 0 || in_payload_ || !batch_.sent() ||
         !control_.empty() || !answers_.empty() || !rx_.buffered().empty();
}

void TcpRail::check_timers(Time now, EventSink& sink) {
  if (closed_) return;
  if (!waiting()) {
    next_check_ = kNever;
    return;
  }
  const bool fresh = next_check_ == kNever;
  if (!fresh && now < next_check_) return;
  const uint64_t moved = bytes_moved(io_.fd);
  if (fresh || moved != moved_) {
    moved_ = moved;
    last_moved_ = now;
  }
  const Time limit = slots_.aborting() ? std::min(kAbortGrace, shared_->stall) : shared_->stall;
  if (now - last_moved_ >= limit) {
    fail(lost(absl::StrFormat(
        "nothing moved for %.1f s with %u slices open: it has stopped reading, is stopped, or the "
        "network between is down",
        std::chrono::duration<double>(now - last_moved_).count(), slots_.live())));
    finish(sink);
    return;
  }
  next_check_ = now + std::max<Time>(limit / 4, std::chrono::milliseconds(1));
}

void TcpRail::remove_region(const RegionEntry& region) {
  if (closed_) return;
  const auto names = [&](const Frame& f) {
    return f.pieces > 0 && f.region == region.index && f.generation == region.generation;
  };
  const absl::Status gone = absl::NotFoundError(
      "the remote region is stale: its owner deregistered it during the transfer");
  if (incoming_.active && names(incoming_.frame)) {
    shared_->engine->stop_receive(io_);
    if (in_payload_ && payload_frame_.type == FrameType::kWrite) rx_.discard();
    incoming_.error.Update(gone);
  }
  for (uint8_t at = 0; at < kDepth; ++at) {
    Job& job = jobs_[at];
    if (!job.live || !names(job.frame)) continue;
    const auto batched = std::find_if(batched_.begin(), batched_.end(),
                                      [&](const BatchedJob& b) { return b.job == at; });
    if (batched == batched_.end()) {
      answers_.remove(at);
      job.live = false;
      answer(FrameType::kReadEnd, job.frame, job.frame.slice_offset, gone);
      continue;
    }
    shared_->engine->stop_send(io_);
    if (io_.tx.done && io_.tx.result > 0) {  // account for what it still sent
      batch_.advance(static_cast<size_t>(io_.tx.result));
      io_.tx.result = 0;
    }
    if (!batch_.unsent_before(batched->end)) continue;  // all of its data has left
    // The frame has promised bytes: send zeros, and take the promise back behind them.
    batch_.blank(batched->begin, batched->end);
    Frame end{.type = FrameType::kReadEnd,
              .code = absl::StatusCode::kNotFound,
              .transfer = job.frame.transfer,
              .slice = job.frame.slice,
              .slice_offset = job.frame.slice_offset + job.frame.bytes};
    encode_header(end, batched->trailer);
  }
}

}  // namespace baton::tcp
