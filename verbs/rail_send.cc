// A verbs rail's outgoing side: cuts slices into work requests.
#include "verbs/rail.h"

#include "absl/strings/str_format.h"
#include "transport/internal/tables/arrivals.h"
#include "verbs/session.h"

namespace baton::verbs {
namespace {

// An immediate names a counter: 16 bits of index, 16 of generation; it counts one. Counters behind
// those are raised by a message.
constexpr uint32_t kImmediateCounters = 1 << 16;
uint32_t immediate_of(const RemoteCounter& counter) {
  return counter.index << 16 | counter.generation;
}

// Limits of one work request: they keep completions regular and bytes in flight balanced.
constexpr size_t kMaxWork = 1 << 20;
constexpr size_t kUrgentShare = 1 << 20;

}  // namespace

bool VerbsRail::tells(const Slice& slice) {
  const TransferDescriptor& transfer = *slice.transfer;
  // Bytes that no caller is told of need no word. A transfer of no bytes is a word.
  return transfer.op == Op::kWrite &&
         (transfer.counter.generation != 0 || !transfer.notify.empty() || transfer.bytes == 0);
}

bool VerbsRail::counts_by_immediate(const Active& active) const {
  const TransferDescriptor& transfer = *active.slice.transfer;
  return active.slice.whole() && transfer.op == Op::kWrite && transfer.counter.generation != 0 &&
         transfer.counter.index < kImmediateCounters && transfer.increment == 1 &&
         transfer.notify.empty();
}

// pump() for the case that this slice is the only work. The doorbell rings before the bookkeeping.
bool VerbsRail::post_promptly(const TransferRequest& request, const TransferDescriptor& transfer) {
  if (!prompt() || queue_pair_->broken() || free_.empty() || owed_ >= queue_pair_->window() / 4) {
    return false;
  }
  const RemoteRegion& remote = request.remote;
  const KnownRegion* const region = session_.known({remote.index, remote.generation, remote.key});
  const bool write = request.op == Op::kWrite;
  const bool counts = request.counter.generation != 0;
  if (counts && request.counter.index >= kImmediateCounters) return false;
  const ibv_mr* const memory = port_.device->region(request.local.index);
  if (region == nullptr || remote.size > region->size || peer_port_ >= region->rkeys.size() ||
      !allows(region->access, write ? Access::kRemoteWrite : Access::kRemoteRead) ||
      memory == nullptr || (counts && credits_ <= kReservedCredits)) {
    return false;
  }
  const auto bytes = static_cast<uint32_t>(request.local_layout.piece_bytes());
  const std::byte* const from = request.local.base + request.local_layout.offset();
  queue_pair_->post_alone(
      {.opcode = !write   ? IBV_WR_RDMA_READ
                 : counts ? IBV_WR_RDMA_WRITE_WITH_IMM
                          : IBV_WR_RDMA_WRITE,
       .tag = free_.back(),
       .remote = region->base + request.remote_layout.offset(),
       .rkey = region->rkeys[peer_port_],
       .immediate = counts ? immediate_of(request.counter) : 0,
       .host_memory = session_.host_memory(request.local.index),
       .stays = session_.stays(request.local.index),
       .local = {
           .addr = reinterpret_cast<uintptr_t>(from), .length = bytes, .lkey = memory->lkey}});
  Active& active = take({&transfer, 0, 0, bytes});
  active.posted = true;
  active.outstanding = 1;
  if (counts) {
    --credits_;
    active.told = active.by_immediate = true;
    active.message = messages_++;
  }
  return true;
}

void VerbsRail::pump() {
  if (state_ != State::kUp && !ready_owed_) return;
  if (send_control() && state_ == State::kUp) {
    if (half_told(bulk_)) pump_first(bulk_);
    if (turns_.large_is_due() && !half_told(urgent_)) pump_first(bulk_);
    while (!half_told(bulk_) && pump_first(urgent_)) {
    }
    // With a doorbell of its own: its completion must not wait for that of bulk behind it.
    if (!bulk_.empty()) queue_pair_->ring();
    while (!half_told(urgent_) && pump_first(bulk_)) {
    }
  }
  queue_pair_->ring();
}

bool VerbsRail::pump_first(base::Ring<uint32_t>& queue) {
  if (queue.empty()) return false;
  const uint32_t tag = queue.front();
  Active& active = active_[tag];
  if (!active.prepared && !prepare(active)) {
    return queue.empty() || queue.front() != tag;  // failed and gone, or waiting for an answer
  }
  if (!post_bytes(active) || !tell(active)) return false;
  active.posted = true;
  if (&queue == &urgent_) {
    turns_.small_went(active.slice.end - active.slice.begin, !bulk_.empty());
  } else {
    turns_.large_went();
  }
  queue.pop_front();
  if (active.outstanding == 0) finish(active, absl::OkStatus());
  return true;
}

bool VerbsRail::prepare(Active& active) {
  const Slice& slice = active.slice;
  const TransferDescriptor& transfer = *slice.transfer;
  const auto refuse = [&](absl::Status why) {
    queue_of(active).pop_front();
    finish(active, std::move(why));
    return false;
  };
  active.has_piece = false;
  active.cursor.reset();
  if (slice.end > slice.begin) {
    const RemoteRegion& remote = transfer.remote;
    const KnownRegion* region =
        session_.region({remote.index, remote.generation, remote.key}, *this);
    if (region == nullptr || region->state == KnownRegion::State::kAsked) return false;
    if (region->state == KnownRegion::State::kRefused) return refuse(region->refusal);
    const bool write = transfer.op == Op::kWrite;
    if (!allows(region->access, write ? Access::kRemoteWrite : Access::kRemoteRead)) {
      return refuse(absl::PermissionDeniedError(absl::StrFormat(
          "the remote region does not allow remote %s: its owner must register it so",
          write ? "writes" : "reads")));
    }
    // The worker has checked the layout against what the RemoteRegion says.
    if (remote.size > region->size && !transfer.remote_layout.check(region->size, "remote").ok()) {
      return refuse(absl::OutOfRangeError(
          absl::StrFormat("the transfer reaches outside the remote region of %u bytes: use the "
                          "RemoteRegion that its owner gave out",
                          region->size)));
    }
    if (peer_port_ >= region->rkeys.size()) {
      return refuse(absl::FailedPreconditionError(
          "the peer has not registered this region with the device of this rail"));
    }
    active.base = region->base;
    active.rkey = region->rkeys[peer_port_];
    active.cursor.emplace(transfer.local, transfer.remote_layout, slice.begin, slice.end);
    advance(active);
  }
  active.prepared = true;
  return true;
}

void VerbsRail::advance(Active& active) {
  active.has_piece = active.cursor->next(active.piece, kMaxWork);
}

// As many pieces as lie next to each other at the peer, into one work request.
void VerbsRail::gather(Active& active, QueuePair::Work& work) {
  const TransferDescriptor& transfer = *active.slice.transfer;
  const uint32_t lkey = port_.device->region(transfer.local_region)->lkey;
  const size_t most = std::min<size_t>(kMaxWork, std::max(1u, port_.attributes.max_msg_sz));
  work.host_memory = session_.host_memory(transfer.local_region);
  work.stays = session_.stays(transfer.local_region);
  work.remote = active.base + active.piece.remote_offset;
  work.rkey = active.rkey;
  work.bytes = 0;
  work.sges = 0;
  uint64_t next = active.piece.remote_offset;
  while (active.has_piece && active.piece.remote_offset == next && work.bytes < most &&
         work.sges < queue_pair_->max_sges(work.opcode)) {
    Piece& piece = active.piece;
    const size_t bytes = std::min(piece.bytes, most - work.bytes);
    work.sge[work.sges++] = {
        .addr = reinterpret_cast<uintptr_t>(transfer.local_base + piece.local_offset),
        .length = static_cast<uint32_t>(bytes),
        .lkey = lkey};
    work.bytes += static_cast<uint32_t>(bytes);
    next += bytes;
    if (bytes == piece.bytes) {
      advance(active);
    } else {
      piece.local_offset += bytes;
      piece.remote_offset += bytes;
      piece.bytes -= bytes;
    }
  }
}

bool VerbsRail::post_bytes(Active& active) {
  const Op op = active.slice.transfer->op;
  // The limit is there for bulk; what overtakes it has a share of its own, and bulk whose turn it
  // is.
  const bool ahead = &queue_of(active) == &urgent_ || turns_.large_is_due();
  const size_t most = session_.tuning().inflight_bytes + (ahead ? kUrgentShare : 0);
  while (active.has_piece) {
    if (queue_pair_->room() <= kReservedRoom || queue_pair_->inflight_bytes() >= most) {
      return false;
    }
    const bool immediate = counts_by_immediate(active);
    // The last request is known only after it is gathered, so its credit is reserved before.
    if (immediate && credits_ <= kReservedCredits) return false;
    QueuePair::Work work;
    work.tag = index_of(active);
    work.opcode = op == Op::kWrite ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
    gather(active, work);
    if (immediate && !active.has_piece) {
      work.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
      work.immediate = immediate_of(active.slice.transfer->counter);
      --credits_;
      active.told = active.by_immediate = true;
      active.message = messages_++;
    }
    queue_pair_->add(work);
    ++active.outstanding;
  }
  return true;
}

// The word to the target, behind the bytes on the same queue pair. False: not all of it yet.
bool VerbsRail::tell(Active& active) {
  if (active.told || !tells(active.slice)) return true;
  const Slice& slice = active.slice;
  const TransferDescriptor& transfer = *slice.transfer;
  const auto may_send = [&] {
    return credits_ > kReservedCredits && queue_pair_->room() > kReservedRoom &&
           queue_pair_->message_room();
  };
  const std::string_view notify =
      slice.end == transfer.bytes ? transfer.notify : std::string_view();
  while (notify.size() - active.notified > kMaxArrivalNotify) {
    if (!may_send()) return false;
    const size_t bytes = std::min(kMaxFragment, notify.size() - active.notified);
    begin_message(message_, Kind::kFragment);
    const auto offset = static_cast<uint32_t>(active.notified);
    message_.append(reinterpret_cast<const char*>(&offset), sizeof offset);
    message_.append(notify.substr(active.notified, bytes));
    active.notified += bytes;
    send_message(index_of(active));
    ++active.outstanding;
  }
  if (!may_send()) return false;
  begin_message(message_, Kind::kArrival);
  encode(message_, Arrival{.transfer = transfer.id,
                           .slice = slice.index,
                           .slice_bytes = slice.end - slice.begin,
                           .total_bytes = transfer.bytes,
                           .counter_index = transfer.counter.index,
                           .counter_generation = transfer.counter.generation,
                           .increment = transfer.increment,
                           .notify = notify.substr(active.notified)});
  active.told = true;
  active.message = messages_;
  send_message(index_of(active));
  ++active.outstanding;
  return true;
}

void VerbsRail::send_message(uint32_t tag) {
  if (owed_ > 0) {
    set_credits(message_, static_cast<uint16_t>(queue_pair_->give_back(std::exchange(owed_, 0))));
  }
  queue_pair_->add_message(message_, tag);
  --credits_;
  ++messages_;
}

// kReady first, then what the session has to say, then credits. False: there is more, and slices
// have to wait behind it.
bool VerbsRail::send_control() {
  if (ready_owed_) {
    begin_message(message_, Kind::kReady);
    send_message(kReadyTag);
    ready_owed_ = false;
  }
  if (state_ != State::kUp) return false;
  // One credit stays for kCredit, without which both sides could wait for each other.
  while (!control_.empty()) {
    if (credits_ <= 1 || !queue_pair_->message_room()) return false;
    message_.swap(control_.front());
    control_.pop_front();
    send_message(QueuePair::kNoTag);
  }
  if (owed_ >= queue_pair_->window() / 4 && owed_ > 0 && credits_ > 0 &&
      queue_pair_->message_room()) {
    begin_message(message_, Kind::kCredit);
    send_message(QueuePair::kNoTag);
  }
  return true;
}

}  // namespace baton::verbs
