// A ucx rail's outgoing side: which message goes next, and what is copied into it.
#include <algorithm>
#include <cstring>

#include "transport/base/copies/fault_guard.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {

using framed::Frame;
using framed::FrameType;
using framed::kHeaderBytes;
using framed::kPieceBytes;
using framed::WirePiece;

// A message: envelope, length, header, pieces and text, tag, payload, and its tag where it has one.
constexpr size_t kFrame = Envelope::kBytes + net::kSealPrefix;
constexpr size_t kHead = kFrame + kHeaderBytes;
constexpr size_t kTags = 2 * net::kSealTag;
static_assert(kHead + kTags + UcxRail::kMaxPieces * kPieceBytes + UcxRail::kPayload + 256 <=
                  kSegmentBytes,
              "data goes through UCX in one piece");
static_assert(kHead + kTags + kPieceBytes + 1 + kMaxNotification <= kMessageBytes);

// Header and tags; the rest lies in the packet.
void UcxRail::send_frame(const Frame& frame, Packet* packet) {
  char* const out = packet->data.get();
  Envelope{there_, sealer_.next()}.encode(out);
  framed::encode_header(frame, out + kFrame);
  const size_t head = kHeaderBytes + frame.meta_bytes();
  char* const payload = out + kFrame + head + net::kSealTag;
  size_t bytes = kFrame + head + net::kSealTag + frame.payload_bytes();
  if (sealer_.payload() && frame.payload_bytes() > 0) {
    sealer_.start_payload();
    sealer_.payload(payload, frame.payload_bytes(), payload);
    sealer_.end_payload(payload + frame.payload_bytes());
    bytes += net::kSealTag;
  }
  sealer_.head(out + Envelope::kBytes, head);
  shared_->engine->send(*endpoint_, packet, bytes);
}

void UcxRail::send_control(const Frame& frame, std::string_view message) {
  if (endpoint_ == nullptr || failing_) return;
  if (endpoint_->under_way >= kMaxControl) {
    fail(lost("it does not read answers"));
    return;
  }
  Packet* packet = shared_->engine->acquire(kHead + message.size() + net::kSealTag);
  message.copy(packet->data.get() + kHead, message.size());
  send_frame(frame, packet);
}

// Requests first, they are small; then data, of ours and of the peer's reads in turn.
bool UcxRail::compose() {
  bool any = false;
  while (!failing_ && reads_open_ < kMaxReads) {
    Slot* slot = next_slot(unasked, read_turns_);
    if (slot == nullptr) break;
    send_read(*slot);
    any = true;
  }
  for (uint32_t i = 0; i < kWindow && !failing_ && endpoint_->under_way < kWindow; ++i) {
    answers_first_ = !answers_first_;
    if (answers_first_ && send_answer()) {
      any = true;
      continue;
    }
    Slot* slot = next_slot(unsaid, write_turns_);
    if (slot != nullptr) {
      send_write(*slot);
    } else if (!send_answer()) {
      break;
    }
    any = true;
  }
  return any;
}

// The oldest slice that has something to say, small ones first, in turns.
UcxRail::Slot* UcxRail::next_slot(bool (*wanted)(const Slot&), base::SmallFirst& turns) {
  if (slots_.live() == 0) return nullptr;
  Slot* small = nullptr;
  Slot* large = nullptr;
  for (Slot& slot : slots_) {
    if (!wanted(slot)) continue;
    if (slot.aborted) return &slot;  // no bytes, and the target is to hear it soon
    Slot*& best = slot.urgent() ? small : large;
    if (best == nullptr || slot.order < best->order) best = &slot;
  }
  if (large != nullptr && (small == nullptr || turns.large_is_due())) {
    turns.large_went();
    return large;
  }
  if (small != nullptr) turns.small_went(small->bytes() - small->framed, large != nullptr);
  return small;
}

// The last frame of a slice of which no more comes.
Frame UcxRail::abandoned(const Slot& slot) {
  return {.type = FrameType::kWrite,
          .flags = framed::kLast | framed::kAbandoned,
          .transfer = slot.id,
          .slice = slot.slice,
          .slice_offset = slot.framed,
          .slice_bytes = slot.bytes(),
          .total_bytes = slot.transfer->bytes};
}

void UcxRail::send_write(Slot& slot) {
  const TransferDescriptor& t = *slot.transfer;
  Frame frame{.type = FrameType::kWrite,
              .transfer = slot.id,
              .slice = slot.slice,
              .slice_offset = slot.framed,
              .slice_bytes = slot.bytes(),
              .total_bytes = t.bytes,
              .counter = t.counter.index,
              .counter_generation = t.counter.generation,
              .increment = t.increment};
  const size_t left = slot.bytes() - slot.framed;
  const std::string_view notify = slot.end == t.bytes ? t.notify : std::string_view();
  size_t room = std::min(kPayload, left);
  // The notification goes with the last bytes; where both do not fit, one byte waits for it.
  if (room == left && left > 1 && left + notify.size() > kPayload) --room;
  const bool small = room == 0 && notify.size() <= 512;
  Packet* packet = shared_->engine->acquire(small ? 1024 : kMessageBytes);
  char* out = packet->data.get() + kHead;
  size_t used = 0;
  if (slot.aborted) {
    frame = abandoned(slot);
  } else {
    // The pieces come before the payload, so they are counted first.
    pieces_.clear();
    TransferCursor cursor(t.local, t.remote_layout, slot.begin + slot.framed,
                          slot.begin + slot.framed + room);
    TransferCursor again = cursor;
    Piece piece;
    while (frame.bytes < room && pieces_.size() < kMaxPieces && cursor.next(piece)) {
      frame.bytes += static_cast<uint32_t>(piece.bytes);
      if (!pieces_.empty() && pieces_.back().offset + pieces_.back().bytes == piece.remote_offset) {
        pieces_.back().bytes += static_cast<uint32_t>(piece.bytes);
      } else {
        pieces_.push_back({piece.remote_offset, static_cast<uint32_t>(piece.bytes)});
      }
    }
    frame.pieces = static_cast<uint32_t>(pieces_.size());
    for (const WirePiece& wire : pieces_) {
      framed::encode_piece(wire, out + used);
      used += kPieceBytes;
    }
    if (frame.pieces > 0) {
      frame.region = t.remote.index;
      frame.generation = t.remote.generation;
      frame.key = t.remote.key;
    }
    if (slot.framed + frame.bytes == slot.bytes()) {
      frame.flags = framed::kLast;
      frame.text = static_cast<uint32_t>(notify.size());
      notify.copy(out + used, notify.size());
      used += notify.size();
    }
    out += used + net::kSealTag;
    const bool there = guarded(t.local_region, [&t, &again, out, bytes = frame.bytes] {
      Piece from;
      for (size_t copied = 0; copied < bytes && again.next(from, bytes - copied);
           copied += from.bytes) {
        std::memcpy(out + copied, t.local_base + from.local_offset, from.bytes);
      }
    });
    if (!there) {
      slot.error = base::source_is_gone();
      frame = abandoned(slot);
    }
  }
  slot.begun = true;
  slot.framed += frame.bytes;
  slot.said = (frame.flags & framed::kLast) != 0;
  send_frame(frame, packet);
}

void UcxRail::send_read(Slot& slot) {
  Packet* packet = shared_->engine->acquire(
      slot.bytes() <= kUrgentBytes / kMaxPieces ? 1024 : kHeaderBytes + kMaxPieces * kPieceBytes);
  char* out = packet->data.get() + kHead;
  const size_t most = (packet->capacity - kHead - net::kSealTag) / kPieceBytes;
  send_frame(ask(slot, std::min<size_t>(most, kMaxPieces), kRequest, out), packet);
}

// The next message of the oldest read of the peer. The region is looked up each time: it may have
// been deregistered since the read was asked for.
bool UcxRail::send_answer() {
  if (jobs_live_ == 0) return false;
  Job* job = nullptr;
  for (Job& other : jobs_) {
    if (other.live && (job == nullptr || other.order < job->order)) job = &other;
  }
  const auto base = resolve(job->frame, Access::kRemoteRead, {});
  if (!base.ok()) {
    end_answer(*job, base.status());
    return true;
  }
  Frame data{.type = FrameType::kReadData,
             .transfer = job->frame.transfer,
             .slice = job->frame.slice,
             .slice_offset = job->frame.slice_offset + job->answered};
  const size_t left = job->frame.bytes - job->answered;
  Packet* packet = shared_->engine->acquire(std::min(kHead + kTags + left, kMessageBytes));
  const size_t room = std::min<size_t>({left, kPayload, packet->capacity - kHead - kTags});
  char* const out = packet->data.get() + kHead + net::kSealTag;
  const bool there = guarded(job->frame.region, [&data, job, room, out, from = *base] {
    while (data.bytes < room) {
      const WirePiece& piece = job->pieces[job->piece];
      const auto step =
          static_cast<uint32_t>(std::min<size_t>(piece.bytes - job->piece_sent, room - data.bytes));
      std::memcpy(out + data.bytes, from + piece.offset + job->piece_sent, step);
      data.bytes += step;
      job->piece_sent += step;
      if (job->piece_sent == piece.bytes) {
        ++job->piece;
        job->piece_sent = 0;
      }
    }
  });
  if (!there) {
    shared_->engine->give_back(packet);
    end_answer(*job, absl::FailedPreconditionError(""));  // framed::status_of() has the words
    return true;
  }
  job->answered += data.bytes;
  send_frame(data, packet);
  if (job->answered == job->frame.bytes) end_answer(*job, absl::OkStatus());
  return true;
}

void UcxRail::end_answer(Job& job, const absl::Status& status) {
  answer(FrameType::kReadEnd, job.frame, status);
  job.live = false;
  --jobs_live_;
}

}  // namespace baton::ucx
