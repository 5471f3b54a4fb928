// A tcp rail's incoming side: every frame is checked before a byte of it moves, payload lands
// exactly where it belongs, and what must not land is drained.
#include <cerrno>
#include <cstring>

#include "transport/base/copies/fault_guard.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {
namespace {

constexpr std::string_view kForged =
    "bytes that the peer did not send, or not at this point: something between changed, repeated "
    "or dropped part of the connection";

}  // namespace

// The memory where the payload was to land has been unmapped or protected. That is the end of this
// slice; the stream goes on.
void TcpRail::landing_failed() {
  rx_.discard();
  const absl::Status why = base::target_is_gone();
  if (payload_frame_.type == framed::FrameType::kWrite) {
    incoming_.error = why;
  } else if (landing_slot_ >= 0) {
    slots_[landing_slot_].error = why;
    reads_.remove(static_cast<uint8_t>(landing_slot_));
    landing_slot_ = -1;
  }
}

bool TcpRail::receive(EventSink& sink) {
  msghdr message;
  rx_.fill(message);
  const ssize_t received = socket_.receive(message, look_again(rx_.may_fault()));
  looked_ = shared_->round;
  if (received == -EAGAIN) return false;
  if (received == -EFAULT && in_payload_ && !rx_.discarding()) {
    landing_failed();
    return true;
  }
  if (received <= 0) {
    if (received == 0 || received == -ECONNRESET) report_broken(sink);
    stalled_ |= received == -ETIMEDOUT;
    fail(lost(received == 0 ? "it closed the connection" : strerror(static_cast<int>(-received))));
    return true;
  }
  note_size(static_cast<size_t>(received));
  if (!rx_.received(static_cast<size_t>(received))) landing_failed();
  parse(sink);
  return true;
}

void TcpRail::note_size(size_t received) {
  small_ = received <= AckHold::kBytes ? small_ + 1 : 0;
  small_at_ = shared_->now;
}

// The peer has closed its end, so nothing of this write lands there any more.
void TcpRail::report_broken(EventSink& sink) {
  if (broken_slot_ < 0) return;
  Slot& slot = slots_[broken_slot_];
  if (slot.live && !slot.error.ok()) report(slot, slot.error, sink);
}

void TcpRail::parse(EventSink& sink) {
  while (!failing_) {
    if (in_payload_) {
      if (!rx_.absorb()) {
        landing_failed();
        continue;
      }
      if (rx_.payload_left() > 0) return;
      if (opener_.payload()) {
        if (rx_.buffered().size() < net::kSealTag) return;
        if (!payload_proved()) return fail(lost(kForged));
      }
      in_payload_ = false;
      if (payload_frame_.type == framed::FrameType::kWrite) {
        on_write_landed(sink);
      } else {
        on_read_data_landed();
      }
      continue;
    }
    std::string_view head;
    const auto found = opener_.head(rx_.front(), rx_.buffered().size(), framed::kMaxHead, head);
    if (found == net::Opener::Found::kMore) return;
    // Not the peer's doing: it may be called again.
    if (found == net::Opener::Found::kForged) return fail(lost(kForged));
    absl::StatusOr<framed::Frame> frame =
        framed::decode_header(head.substr(0, framed::kHeaderBytes));
    if (!frame.ok()) {
      hostile(std::string(frame.status().message()));
      return;
    }
    if (head.size() != framed::kHeaderBytes + frame->meta_bytes()) {
      hostile(frame->type, "its length differs from its header's");
      return;
    }
    rx_.consume(head.size() + net::kSealBytes);
    handle(*frame, head.substr(framed::kHeaderBytes), sink);
  }
}

// The tag behind a payload. What has not landed needs none.
bool TcpRail::payload_proved() {
  const bool proved = rx_.discarding() || opener_.end_payload(rx_.buffered().data());
  rx_.consume(net::kSealTag);
  return proved;
}

void TcpRail::expect_payload(const framed::Frame& frame) {
  in_payload_ = true;
  payload_frame_ = frame;
  rx_.start_payload(frame.bytes);
  if (opener_.payload()) opener_.start_payload();
}

void TcpRail::handle(const framed::Frame& frame, std::string_view meta, EventSink& sink) {
  switch (frame.type) {
    case framed::FrameType::kWrite:
      return on_write(frame, meta, sink);
    case framed::FrameType::kWriteAck:
      return on_write_ack(frame, framed::frame_text(frame, meta), sink);
    case framed::FrameType::kRead:
      return on_read(frame, meta);
    case framed::FrameType::kReadData:
      return on_read_data(frame);
    case framed::FrameType::kReadEnd:
      return on_read_end(frame, framed::frame_text(frame, meta), sink);
    case framed::FrameType::kCancelRead:
      return on_cancel_read(frame);
    case framed::FrameType::kGoodbye:
      return on_goodbye(frame, framed::frame_text(frame, meta));
  }
}

absl::Status TcpRail::map_pieces(const framed::Frame& frame, Access want,
                                 absl::Span<iovec> out) const {
  const absl::Span<const framed::WirePiece> pieces(shared_->wire_pieces.data(), frame.pieces);
  const auto base = resolve(frame, want, pieces);
  if (!base.ok()) return base.status();
  for (size_t i = 0; i < pieces.size(); ++i) {
    out[i] = {*base + pieces[i].offset, pieces[i].bytes};
  }
  return absl::OkStatus();
}

void TcpRail::on_write(const framed::Frame& frame, std::string_view meta, EventSink& sink) {
  if (absl::Status status =
          framed::decode_pieces(frame, meta, absl::MakeSpan(shared_->wire_pieces));
      !status.ok()) {
    hostile(std::string(status.message()));
    return;
  }
  if (frame.slice_offset == 0) {
    incoming_.active = true;
    incoming_.landed = 0;
    incoming_.error = absl::OkStatus();
  } else if (!incoming_.active || !(incoming_.frame.transfer == frame.transfer) ||
             incoming_.frame.slice != frame.slice || incoming_.landed != frame.slice_offset ||
             incoming_.frame.slice_bytes != frame.slice_bytes) {
    hostile(framed::FrameType::kWrite, "it continues a slice that was never begun");
    return;
  }
  incoming_.frame = frame;
  const std::string_view text = framed::frame_text(frame, meta);
  incoming_.notify.assign(text.data(), text.size());
  if (frame.flags & framed::kAbandoned)
    incoming_.error = absl::CancelledError("abandoned by its sender");
  if (frame.bytes == 0) {
    on_write_landed(sink);
    return;
  }
  if (incoming_.error.ok()) {
    incoming_.error = map_pieces(frame, Access::kRemoteWrite, absl::MakeSpan(shared_->mapped));
  }
  expect_payload(frame);
  if (!incoming_.error.ok()) return;
  if (context_.regions.stays(frame.region)) rx_.memory_stays();
  for (uint32_t i = 0; i < frame.pieces; ++i) {
    rx_.add_piece(shared_->mapped[i].iov_base, shared_->mapped[i].iov_len);
  }
}

void TcpRail::on_write_landed(EventSink& sink) {
  const framed::Frame frame = incoming_.frame;
  incoming_.landed += frame.bytes;
  if (!(frame.flags & framed::kLast)) return;
  incoming_.active = false;
  if (incoming_.error.ok()) {
    arrived(frame, incoming_.notify, sink);
    if (failing_) return;
  }
  answer(framed::FrameType::kWriteAck, frame, incoming_.error);
  if (frame.slice_bytes <= AckHold::kBytes && incoming_.error.ok()) {
    hold_.queued(shared_->round, shared_->now);
  } else {
    at_once_ = true;
  }
}

TcpRail::AbortedRead* TcpRail::find_aborted_read(const framed::Frame& frame) {
  for (AbortedRead& aborted : aborted_reads_) {
    if (aborted.reads_open > 0 && aborted.id == frame.transfer && aborted.slice == frame.slice) {
      return &aborted;
    }
  }
  return nullptr;
}

void TcpRail::on_read(const framed::Frame& frame, std::string_view meta) {
  absl::Status status = framed::decode_pieces(frame, meta, absl::MakeSpan(shared_->wire_pieces));
  if (!status.ok()) {
    hostile(std::string(status.message()));
    return;
  }
  if (jobs_.empty()) jobs_.resize(kDepth);
  uint8_t at = 0;
  while (at < kDepth && jobs_[at].live) ++at;
  if (at == kDepth) {
    hostile(framed::FrameType::kRead, "too many reads at a time");
    return;
  }
  Job& job = jobs_[at];
  job.pieces.resize(frame.pieces);
  status = map_pieces(frame, Access::kRemoteRead, absl::MakeSpan(job.pieces));
  if (!status.ok()) {
    answer(framed::FrameType::kReadEnd, frame, status, frame.slice_offset);
    return;
  }
  job.live = true;
  job.frame = frame;
  answers_.push(at);
}

void TcpRail::on_cancel_read(const framed::Frame& frame) {
  for (size_t at = 0; at < jobs_.size(); ++at) {
    Job& job = jobs_[at];
    if (!job.live || !(job.frame.transfer == frame.transfer) || job.frame.slice != frame.slice) {
      continue;
    }
    bool batched = false;
    for (const BatchedJob& b : batched_) batched |= b.job == at;
    if (batched) continue;
    answers_.remove(static_cast<uint8_t>(at));
    job.live = false;
    answer(framed::FrameType::kReadEnd, job.frame, absl::CancelledError("cancelled"),
           job.frame.slice_offset);
  }
}

void TcpRail::on_read_data(const framed::Frame& frame) {
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr && find_aborted_read(frame) == nullptr) {
    hostile(framed::FrameType::kReadData, "no such slice was asked for");
    return;
  }
  expect_payload(frame);
  landing_slot_ = -1;
  if (slot == nullptr || !slot->error.ok()) return;  // to nowhere
  if (slot->received != frame.slice_offset || frame.bytes > slot->framed - slot->received) {
    hostile(framed::FrameType::kReadData, "it does not continue its slice");
    return;
  }
  landing_slot_ = slots_.number_of(*slot);
  const TransferDescriptor& t = *slot->transfer;
  // Cut as the request was, so that the pieces are no more than one frame may have.
  TransferCursor cursor(t.local, t.remote_layout, slot->begin + slot->received,
                        slot->begin + slot->received + frame.bytes);
  if (context_.regions.stays(t.local_region)) rx_.memory_stays();
  Piece piece;
  uint32_t pieces = 0;
  for (; pieces < framed::kMaxPieces && cursor.next(piece); ++pieces) {
    rx_.add_piece(t.local_base + piece.local_offset, piece.bytes);
  }
  if (cursor.remaining() > 0) {
    hostile(framed::FrameType::kReadData, "it answers more than one READ");
  }
}

void TcpRail::on_read_data_landed() {
  if (landing_slot_ >= 0) slots_[landing_slot_].received += payload_frame_.bytes;
  landing_slot_ = -1;
}

void TcpRail::on_read_end(const framed::Frame& frame, std::string_view text, EventSink& sink) {
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr) {
    AbortedRead* aborted = find_aborted_read(frame);
    if (aborted == nullptr) {
      hostile(framed::FrameType::kReadEnd, "no such slice was asked for");
      return;
    }
    --aborted->reads_open;
    --reads_open_;
    return;
  }
  const absl::Status status = framed::status_of(frame, text);
  if (slot->reads_open == 0 ||
      (status.ok() && slot->error.ok() && slot->received < frame.slice_offset)) {
    hostile(framed::FrameType::kReadEnd, "its bytes have not arrived");
    return;
  }
  --slot->reads_open;
  --reads_open_;
  if (slot->error.ok() && !status.ok()) {
    slot->error = status;
    reads_.remove(slots_.number_of(*slot));  // ask for no more of it
  }
  if (slot->reads_open > 0) return;
  if (!slot->error.ok()) {
    report(*slot, slot->error, sink);
  } else if (slot->framed == slot->bytes()) {
    if (slot->received == slot->bytes()) {
      report(*slot, absl::OkStatus(), sink);
    } else {
      hostile(framed::FrameType::kReadEnd, "bytes of the slice are missing");
    }
  }
}

}  // namespace baton::tcp
