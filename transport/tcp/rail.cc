// A tcp rail as its provider and its base see it: made, run, asked what it waits for, ended.
#include "transport/tcp/rail.h"

#include <algorithm>
#include <new>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::tcp {
namespace {
constexpr std::string_view kNoMemory =
    "this process has no memory left for the buffers of a connection: raise its limits (ulimit -v, "
    "the cgroup's memory.max) or free memory";
}  // namespace

std::unique_ptr<RailMemory> RailMemory::make(FileBuffers& buffers) try {
  auto made = std::make_unique<RailMemory>(buffers);
  if (made->rx.buffer.data == nullptr) return nullptr;
  return made;
} catch (const std::bad_alloc&) {
  return nullptr;
}

TcpRail::TcpRail(std::shared_ptr<TcpShared> shared, const net::Link& link, const HelloInfo& peer,
                 Properties properties)
    : FramedRail(shared->context, shared->stall,
                 absl::StrCat(peer.name.empty() ? "?" : peer.name, " (",
                              net::peer_of(link.fd).text(), ")"),
                 std::move(properties)),
      shared_(std::move(shared)),
      uid_(peer.uid),
      socket_(link.fd, *shared_->poller),
      sealer_(link.keys.send, link.keys.protection),
      hold_(shared_->ack_hold),
      opener_(link.keys.receive, link.keys.protection),
      rx_(shared_->nowhere.get(), opener_) {
  if (sealer_.payload()) sealed_ = shared_->sealing->take();
}

absl::StatusOr<std::unique_ptr<TcpRail>> TcpRail::create(std::shared_ptr<TcpShared> shared,
                                                         const net::Link& link,
                                                         const HelloInfo& peer,
                                                         const std::string& sockets) {
  const net::Endpoint remote = net::peer_of(link.fd);
  const std::string congestion = net::tune(link.fd, remote, shared->socket_options);
  const bool plain = link.keys.protection == net::Protection::kHeads;
  const std::string protection = plain ? "" : absl::StrCat(", ", net::name(link.keys.protection));
  const size_t segment = net::largest_segment(link.fd);
  const std::string small =
      segment > net::Dial::kSegments[1] ? "" : absl::StrFormat(", segments of %d bytes", segment);
  Properties properties{.provider = "tcp",
                        .route = absl::StrFormat("tcp %s (%s, %s%s%s)", remote.text(), congestion,
                                                 sockets, small, protection),
                        .bytes_per_second = 2e9,
                        .slice_bytes = shared->slice_bytes,
                        .depth = kDepth};
  if (!plain && shared->sealing == nullptr) {
    shared->sealing = std::make_unique<FileBuffers>(kSealedBatch);
  }
  std::unique_ptr<TcpRail> rail(new TcpRail(std::move(shared), link, peer, std::move(properties)));
  rail->at_ = rail->shared_->rails.size();
  rail->shared_->rails.push_back(rail.get());
  if (!plain && rail->sealed_.data == nullptr) return rail->lost(kNoMemory);
  absl::Status status = rail->socket_.watch(rail.get());
  if (!status.ok()) return status;
  rail->activate();
  if (rail->failing_) return rail->failure_;
  return rail;
}

TcpRail::~TcpRail() {
  leave();
  if (sealed_.data != nullptr) shared_->sealing->give_back(sealed_);
}

void TcpRail::activate() {
  if (std::exchange(active_, true)) return;
  shared_->active.push_back(this);
  if (shared_->spares.empty()) {
    memory_ = RailMemory::make(*shared_->buffers);
    if (memory_ == nullptr) return fail(lost(kNoMemory));
  } else {
    memory_ = std::move(shared_->spares.back());
    shared_->spares.pop_back();
  }
  memory_->control.assign(control_);
  control_.swap(memory_->control);
  batch_.lend(&memory_->tx);
  rx_.lend(&memory_->rx);
}

void TcpRail::deactivate() {
  active_ = false;
  control_.swap(memory_->control);  // nothing is waiting in it
  batch_.lend(nullptr);
  rx_.lend(nullptr);
  if (shared_->spares.size() < TcpShared::kSpares) shared_->spares.push_back(std::move(memory_));
  memory_.reset();
}

void TcpRail::taken(Slot& slot) {
  activate();
  (slot.op == Op::kWrite ? writes_of(slot) : reads_).push(slots_.number_of(slot));
}

void TcpRail::take_back(Slot& slot) {
  const uint8_t at = slots_.number_of(slot);
  if (slot.op == Op::kWrite) {
    writes_of(slot).remove(at);
    return;
  }
  reads_.remove(at);
  if (landing_slot_ == at) {
    rx_.discard();
    landing_slot_ = -1;
  }
  if (slot.reads_open == 0) return;
  auto aborted = std::find_if(aborted_reads_.begin(), aborted_reads_.end(),
                              [](const AbortedRead& read) { return read.reads_open == 0; });
  *aborted = {slot.id, slot.slice, slot.reads_open};  // there are as many as open reads
  send_control({.type = framed::FrameType::kCancelRead, .transfer = slot.id, .slice = slot.slice},
               {});
}

void TcpRail::called(std::shared_ptr<CalledSockets> sockets, uint16_t number,
                     const net::Endpoint& at, bool narrow) {
  called_ = std::move(sockets);
  number_ = number;
  ++called_->open;
  called_->places[number] = {this, at, narrow};
}

void TcpRail::give_way(EventSink& sink) {
  --called_->open;
  called_.reset();
  close(lost("another socket works again on its own path, or with full packets"), sink);
}

// Sockets to the peer that go the same way as this one, and have been silent for as long, are as
// dead, though no caller waits for anything on them and would notice: what is said about this one
// must not go there. Where there is no other way, nothing is known of them.
void TcpRail::stalled() {
  stalled_ = true;
  const net::Endpoint from = net::local_of(socket_.fd()), to = net::peer_of(socket_.fd());
  bool another_way = false;
  std::vector<TcpRail*> beside;
  for (TcpRail* rail : shared_->rails) {
    if (rail == this || rail->uid_ != uid_ || rail->failing_) continue;
    const int fd = rail->socket_.fd();
    if (!net::local_of(fd).same_host(from) || !net::peer_of(fd).same_host(to)) {
      another_way = true;
    } else if (net::silent_for(fd) >= shared_->stall) {
      beside.push_back(rail);
    }
  }
  if (!another_way) return;
  for (TcpRail* rail : beside) {
    rail->activate();
    rail->stalled_ = true;
    rail->fail(rail->lost("another socket on the same path has stalled"));
  }
}

void TcpRail::leave() {
  if (socket_.fd() < 0) return;
  const bool lost = failing_ && absl::IsUnavailable(failure_);
  if (lost || !may_be_read_to_the_end()) {
    socket_.reset_on_close();
  } else {
    socket_.end();
  }
  socket_.close();
  std::vector<TcpRail*>& all = shared_->rails;
  std::swap(all[at_], all.back());
  all[at_]->at_ = at_;
  all.pop_back();
  if (called_ != nullptr) {
    --called_->open;
    CalledSockets::Place& place = called_->places[number_];
    if (place.rail == this) {
      if (lost) called_->lost_by(place.at, stalled_, shared_->context.clock.now());
      place = {};
    }
    const bool wanted = failing_ && (lost || absl::IsDataLoss(failure_));
    if (wanted && called_->open > 0 && place.rail == nullptr) {
      shared_->redials.lost(std::move(called_), number_, shared_->context.clock.now());
    }
    called_.reset();
  }
  if (!active_) return;
  std::vector<TcpRail*>& active = shared_->active;
  std::replace(active.begin(), active.end(), this, static_cast<TcpRail*>(nullptr));
}

// Whether all that the kernel has of us may still reach the peer after our end: acknowledgements,
// counters and notifications may, half a frame and bytes of transfers that end now may not.
bool TcpRail::may_be_read_to_the_end() const {
  return batch_.sent() && std::none_of(slots_.begin(), slots_.end(), [](const auto& slot) {
           return slot.live && slot.bytes() > 0;
         });
}

// Only between two frames, and only what the socket takes now: no thread waits for a goodbye.
void TcpRail::say_goodbye(std::string_view why) {
  if (socket_.fd() < 0 || !may_be_read_to_the_end()) return;
  activate();
  if (memory_ == nullptr) return;
  const std::string_view text = why.substr(0, framed::kMaxText);
  send_control({.type = framed::FrameType::kGoodbye, .text = static_cast<uint32_t>(text.size())},
               text);
  send();
}

bool TcpRail::advance(EventSink& sink) {
  if (closed_) return false;
  inside_ = true;
  socket_.look_again(shared_->now);
  bool any = false;
  if (!failing_ && socket_.direct() && !urgent_.empty() && socket_.can_send()) any |= send();
  if (!failing_ && listening() && socket_.can_receive()) any |= receive(sink);
  if (!failing_ && socket_.can_send()) any |= send();
  inside_ = false;
  if (failing_) finish(sink);
  return any;
}

// A peer that sends but takes no answers is not read from until it does.
bool TcpRail::listening() const { return control_.size() < TxBatch::kArenaBytes; }

bool TcpRail::hot() const {
  return small_ >= kHotFrom && !closed_ && listening() && !socket_.can_receive() &&
         shared_->round - looked_ <= 1 && shared_->now - small_at_ <= kHotFor;
}

// Now. What waits for its time is no reason to stay awake.
bool TcpRail::something_to_send() const {
  if (broken_slot_ >= 0) return false;
  return !batch_.sent() || (!control_.empty() && ack_due() == kNever) || data_to_send();
}

bool TcpRail::data_to_send() const {
  return !writes_.empty() || !urgent_.empty() || !answers_.empty() ||
         (!reads_.empty() && reads_open_ < kMaxReads);
}

bool TcpRail::runnable() const {
  if (closed_) return false;
  return failing_ || (listening() && socket_.can_receive()) ||
         (something_to_send() && socket_.can_send());
}

bool TcpRail::waiting() const {
  return slots_.live() > 0 || reads_open_ > 0 || in_payload_ || !batch_.sent() ||
         !control_.empty() || !answers_.empty() || !rx_.buffered().empty();
}

uint64_t TcpRail::moved() const { return net::bytes_moved(socket_.fd()); }

void TcpRail::remove_region(const RegionEntry& region) {
  if (closed_) return;
  const auto names = [&](const framed::Frame& f) {
    return f.pieces > 0 && f.region == region.index && f.generation == region.generation;
  };
  const absl::Status gone = absl::NotFoundError(
      "the remote region is stale: its owner deregistered it during the transfer");
  if (incoming_.active && names(incoming_.frame)) {
    if (in_payload_ && payload_frame_.type == framed::FrameType::kWrite) rx_.discard();
    incoming_.error.Update(gone);
  }
  for (size_t at = 0; at < jobs_.size(); ++at) {
    Job& job = jobs_[at];
    if (!job.live || !names(job.frame)) continue;
    const auto batched = std::find_if(batched_.begin(), batched_.end(),
                                      [&](const BatchedJob& b) { return b.job == at; });
    if (batched == batched_.end()) {
      answers_.remove(static_cast<uint8_t>(at));
      job.live = false;
      answer(framed::FrameType::kReadEnd, job.frame, gone, job.frame.slice_offset);
      continue;
    }
    // All of its data has left, or a copy of them that needs the region no more.
    if (!batch_.unsent_before(batched->end) || sealer_.payload()) continue;
    take_back_answer(*batched, absl::StatusCode::kNotFound);
  }
}

}  // namespace baton::tcp
