// The life of a rail: taking slices, finishing them, breaking, recovering, going down.
#include "verbs/rail.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "verbs/session.h"

namespace baton::verbs {

VerbsRail::VerbsRail(Session& session, const Port& port, uint16_t index)
    : session_(session), port_(port), index_(index) {
  const Tuning& tuning = session.tuning();
  properties_.provider = "verbs";
  properties_.bytes_per_second = port.bytes_per_second();
  properties_.slice_bytes = tuning.slice_bytes;
  properties_.depth = tuning.send_depth / 2;
  active_.resize(properties_.depth);
  for (uint32_t i = properties_.depth; i-- > 0;) free_.push_back(i);
}

VerbsRail::~VerbsRail() { session_.forget(*this); }

double VerbsRail::share(uint32_t region) const {
  return properties_.bytes_per_second / session_.distance(port_, region);
}

// The rail's adapter may not have registered device memory, for want of window space or after
// a failed self-check.
absl::Status VerbsRail::moves(const RegionEntry& region) const {
  absl::Status status = reaches_memory(region);
  if (!status.ok() || region.place.kind == MemoryKind::kHost) return status;
  if (port_.device->region(region.index) != nullptr) return status;
  return absl::FailedPreconditionError(
      absl::StrFormat("%s could not register memory of %s", port_.name(), region.place.name()));
}

std::string VerbsRail::about_devices() const { return session_.about_devices(port_); }

absl::Status VerbsRail::reaches(const RemoteRegion&) const { return absl::OkStatus(); }

void VerbsRail::start(std::unique_ptr<QueuePair> queue_pair, const Endpoint& peer,
                      uint32_t incarnation, bool connecting) {
  queue_pair_ = std::move(queue_pair);
  incarnation_ = incarnation;
  peer_port_ = peer.origin;
  credits_ = peer.receives;
  owed_ = 0;
  messages_ = 0;
  ready_owed_ = connecting;
  state_ = State::kConnecting;
  why_ = absl::OkStatus();
  lost_ = drained_ = settled_ = false;
  peer_received_.reset();
  deadline_ = last_moved_ = quiet_since_ = down_until_ = kNever;
  notify_.clear();
  properties_.route =
      absl::StrFormat("verbs %s -> %s (%s, MTU %u, queue pair %u; %s)", port_.name(),
                      gid_text(peer.gid), name_of(static_cast<Family>(peer.family)),
                      queue_pair_->mtu_bytes(), queue_pair_->number(), queue_pair_->ends());
  if (const int node = port_.device->node(); node >= 0) {
    absl::StrAppendFormat(&properties_.route, ", NUMA node %d", node);
  }
}

VerbsRail::Active& VerbsRail::take(const Slice& slice) {
  Active& active = active_[free_.back()];
  free_.pop_back();
  active.used = true;
  active.prepared = active.posted = active.aborted = active.refused = false;
  active.told = active.by_immediate = false;
  active.order = next_order_++;
  active.outstanding = 0;
  active.notified = 0;
  active.slice = slice;
  active.has_piece = false;
  active.failure = absl::OkStatus();
  return active;
}

bool VerbsRail::post(const Slice& slice, EventSink& sink) {
  if (state_ == State::kDown || free_.empty()) return false;
  Active& active = take(slice);
  // progress() posts it together with other slices; a small slice that is alone is posted at once.
  const bool alone = slice.end - slice.begin <= kMost && prompt();
  queue_of(active).push_back(index_of(active));
  if (alone) {
    EventSink* const before = std::exchange(sink_, &sink);
    pump();
    sink_ = before;
  }
  return true;
}

std::optional<internal::Ordinal> VerbsRail::counted() const {
  if (queue_pair_ == nullptr) return std::nullopt;
  return internal::Ordinal{incarnation_, static_cast<uint32_t>(queue_pair_->received())};
}

void VerbsRail::finish(Active& active, absl::Status status) {
  const TransferId id = active.slice.transfer->id;
  const uint32_t slice = active.slice.index;
  active.used = false;
  free_.push_back(index_of(active));
  sink_->slice_done(*this, id, slice, std::move(status));
}

// Work that is in the queue pair completes soon by itself: only the rest is held back. The rest of
// a notification is still sent, because the peer would take its beginning for the beginning of the
// next one.
void VerbsRail::abort(TransferId transfer, EventSink& sink) {
  EventSink* const before = std::exchange(sink_, &sink);
  for (base::Ring<uint32_t>* queue : {&urgent_, &bulk_}) {
    queue->remove_if([&](uint32_t index) {
      Active& active = active_[index];
      if (active.slice.transfer->id != transfer) return false;
      active.aborted = true;
      return !half_told(active);
    });
  }
  for (Active& active : active_) {
    if (active.used && active.aborted && active.outstanding == 0 && !active.posted &&
        !half_told(active) && active.slice.transfer->id == transfer) {
      finish(active, absl::CancelledError("cancelled"));
    }
  }
  sink_ = before;
}

// The adapter reads and writes until it says that it has.
bool VerbsRail::let_go(TransferId transfer) const {
  return std::none_of(active_.begin(), active_.end(), [&](const Active& active) {
    return active.used && active.slice.transfer->id == transfer;
  });
}

void VerbsRail::close(absl::Status why, EventSink& sink) {
  if (absl::IsUnavailable(why)) return lose(why, sink);  // not for good: it comes back
  if (state_ == State::kDown || ending_) return;
  EventSink* const before = std::exchange(sink_, &sink);
  go_down(why, why, true);
  sink_ = before;
}

void VerbsRail::lose(const absl::Status& why, EventSink& sink) {
  if (state_ == State::kDown || ending_) return;
  EventSink* const before = std::exchange(sink_, &sink);
  go_down(why, absl::UnavailableError(why.message()), false);
  sink_ = before;
}

void VerbsRail::look(EventSink& sink) {
  EventSink* const before = std::exchange(sink_, &sink);
  while (queue_pair_ != nullptr && queue_pair_->poll(*this)) {
  }
  sink_ = before;
}

void VerbsRail::go_down(const absl::Status& why, const absl::Status& slices, bool closed) {
  ending_ = true;
  // Word of the end may come by another way, before what went ahead of it has been looked at: what
  // the peer knows to have arrived counts.
  while (queue_pair_ != nullptr && queue_pair_->poll(*this)) {
  }
  // Destroyed first: when the slices are reported the adapter has let go of their memory.
  if (queue_pair_ != nullptr) queue_pair_->destroy(this);
  state_ = State::kDown;
  control_.clear();
  urgent_.clear();
  bulk_.clear();
  for (Active& active : active_) {
    if (!active.used) continue;
    const bool sent = active.outstanding > 0 || active.posted || active.told;
    if (sent && !closed && active.slice.transfer->op == Op::kWrite) {
      // An immediate raises the counter without a name: the peer knows how many have come.
      absl::Status unknown = absl::UnknownError(why.message());
      if (active.by_immediate) {
        internal::set_ordinal(unknown, {incarnation_, static_cast<uint32_t>(active.message)});
      }
      finish(active, std::move(unknown));
    } else if (active.aborted) {
      finish(active, absl::CancelledError("cancelled"));
    } else {
      finish(active, slices);
    }
  }
  session_.rail_gone(*this, why, closed);
  if (known_) sink_->rail_down(*this, why);
}

void VerbsRail::fail(const absl::Status& why, bool lost) {
  if (state_ == State::kDown) return;
  if (state_ == State::kBroken) {
    lost_ = lost_ || lost;
    return;
  }
  // A queue pair that breaks again before it was up is not worth a third try.
  lost_ = lost || state_ == State::kConnecting;
  state_ = State::kBroken;
  why_ = why;
  control_.clear();
  ready_owed_ = false;
  // Shorter than what the other end waits for our word, so that it comes in time even from a queue
  // pair that does not drain.
  deadline_ = session_.now() + session_.tuning().settle / 4;
  queue_pair_->break_off();
  session_.rail_broke();
}

// Posted work stays in the queue pair while the link is down, and the adapter retries: a short flap
// costs only time. If another rail can take over, that is quicker.
void VerbsRail::port_changed() {
  if (state_ == State::kDown || queue_pair_ == nullptr) return;
  if (port_.up()) {
    down_until_ = kNever;
    if (queue_pair_->address_stands()) return;
    return fail(absl::UnavailableError(absl::StrCat("the addresses of ", port_.name(), " changed")),
                true);
  }
  const Time grace = session_.tuning().port_grace;
  if (state_ != State::kUp || port_.device->dead() || session_.others_up(*this)) {
    fail(went_down(), true);
  } else if (down_until_ == kNever) {
    down_until_ = session_.now() + grace;
  }
}

void VerbsRail::device_event(const Device::Event& event) {
  if (queue_pair_ == nullptr) return;
  const auto failed = [&](const char* what, bool lost) {
    fail(absl::UnavailableError(absl::StrFormat("the adapter reported event %u (%s) on %s",
                                                event.type, what, port_.name())),
         lost);
  };
  if (event.type == IBV_EVENT_SRQ_ERR) {
    if (queue_pair_->shares_receives()) failed("shared receives", false);
  } else if (event.type == IBV_EVENT_CQ_ERR) {
    // The completions in the queue are lost.
    if (queue_pair_->is(event.completions)) failed("completion queue", true);
  } else if (queue_pair_->is(event.queue_pair)) {
    if (event.type == IBV_EVENT_QP_LAST_WQE_REACHED) return queue_pair_->set_last_receive();
    failed("queue pair", event.type == IBV_EVENT_QP_FATAL);
  }
}

absl::Status VerbsRail::went_down() const {
  return absl::UnavailableError(absl::StrCat(port_.name(), " went down"));
}

void VerbsRail::peer_drained(uint64_t received, bool lost) {
  peer_received_ = received;
  fail(absl::UnavailableError("the peer's end of this rail broke"), lost);
}

bool VerbsRail::move_on(Time now) {
  if (!drained_) {
    if (!queue_pair_->drained()) {
      if (now < deadline_) return false;
      queue_pair_->destroy();
      lost_ = true;
    }
    drained_ = true;
    received_ = queue_pair_->received();
    deadline_ = now + session_.tuning().settle;
    session_.rail_drained(*this, lost_);
  }
  if (!settled_) {
    // The last rail has no rail to hand its slices to, so there is nothing to find out.
    const bool pointless = lost_ && !session_.others_up(*this);
    if (!peer_received_ && !pointless && now < deadline_) return false;
    if (!peer_received_) lost_ = true;
    settled_ = true;
    queue_pair_->destroy();
    settle();
    deadline_ = now + session_.tuning().connect;
    if (!lost_) session_.rail_settled(*this);
  }
  if (lost_ || now >= deadline_) {
    lose(why_, *sink_);
    return true;
  }
  return false;
}

// Nothing of this queue pair moves any more, at either end, and both know what has arrived.
void VerbsRail::settle() {
  // Without the peer's word the rail goes down, and what was sent is asked about over another.
  if (!peer_received_) {
    for (Active& active : active_) {
      if (active.used && !active.failure.ok()) {
        finish(active, std::exchange(active.failure, absl::OkStatus()));
      }
    }
    return;
  }
  std::vector<uint32_t> again;
  urgent_.clear();
  bulk_.clear();
  for (uint32_t i = 0; i < active_.size(); ++i) {
    Active& active = active_[i];
    active.outstanding = 0;
    if (!active.used) continue;
    if (active.told && active.message < *peer_received_) {
      finish(active, absl::OkStatus());
    } else if (!active.failure.ok()) {
      finish(active, std::exchange(active.failure, absl::OkStatus()));
    } else if (active.aborted) {
      finish(active, absl::CancelledError("cancelled"));
    } else {
      active.by_immediate = false;
      again.push_back(i);
    }
  }
  std::sort(again.begin(), again.end(),
            [this](uint32_t a, uint32_t b) { return active_[a].order < active_[b].order; });
  for (uint32_t index : again) {
    Active& active = active_[index];
    if (!active.used) continue;  // aborted by a report of another
    active.prepared = active.posted = active.told = false;
    active.notified = 0;
    queue_of(active).push_back(index);
  }
}

bool VerbsRail::progress(Time now, EventSink& sink) {
  if (state_ == State::kDown || queue_pair_ == nullptr) return false;
  sink_ = &sink;
  now_ = now;
  bool any = queue_pair_->poll(*this);
  if (state_ == State::kConnecting || state_ == State::kUp) {
    if (queue_pair_->broken()) {
      fail(absl::UnavailableError("the peer's end of the queue pair broke"), false);
    } else {
      pump();
    }
  }
  if (any) last_moved_ = quiet_since_ = kNever;
  if (state_ == State::kUp && queue_pair_->idle()) probe(now);
  if (queue_pair_->idle()) {
    last_moved_ = kNever;
  } else if (last_moved_ == kNever || now - looked_ >= session_.tuning().stall / 2) {
    last_moved_ = now;  // while this program stood still, nothing could be heard
  } else if (now - last_moved_ >= session_.tuning().stall && state_ != State::kBroken) {
    fail(absl::UnavailableError(absl::StrFormat(
             "a work request on %s has been pending for %d ms: see the counters under "
             "/sys/class/infiniband/%s/ports/%u/hw_counters",
             port_.name(),
             std::chrono::duration_cast<std::chrono::milliseconds>(now - last_moved_).count(),
             port_.device->name(), port_.number)),
         true);
  }
  looked_ = now;
  if (now >= down_until_) fail(went_down(), true);
  if (state_ == State::kBroken) any |= move_on(now);
  sink_ = nullptr;
  return any;
}

// An adapter only finds out that its peer is gone by sending something. A queue pair that waits for
// the peer (credits, an answer) or has nothing to do sends a write of no bytes now and then: it
// needs no receive, no region and no program at the other end.
void VerbsRail::probe(Time now) {
  if (quiet_since_ == kNever) {
    quiet_since_ = now;
  } else if (now - quiet_since_ >= probe_after()) {
    quiet_since_ = kNever;
    queue_pair_->add({.opcode = IBV_WR_RDMA_WRITE, .tag = QueuePair::kNoTag});
    queue_pair_->ring();
  }
}

Time VerbsRail::probe_after() const {
  const Time idle = session_.tuning().probe;
  return urgent_.empty() && bulk_.empty() && control_.empty() ? idle : idle / 10;
}

Time VerbsRail::next_timer() const {
  if (state_ == State::kDown) return kNever;
  // While the queue pair drains, an event ends it, or, on drivers without that event, polling
  // (QueuePair::drained()).
  if (state_ == State::kBroken) return !drained_ && queue_pair_->idle() ? Time::zero() : deadline_;
  if (quiet_since_ != kNever) return std::min(down_until_, quiet_since_ + probe_after());
  if (last_moved_ == kNever) return down_until_;
  // Looked at in between, so that it is known how much of the time was spent asleep.
  const Time stall = session_.tuning().stall;
  return std::min({down_until_, last_moved_ + stall, looked_ + stall / 4});
}

}  // namespace baton::verbs
