// A tcp rail's incoming side: every frame is checked before a byte of it moves, payload lands
// exactly where it belongs, and what must not land is drained.
#include <cerrno>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {
namespace {

// What a peer says, fit for messages and terminals.
absl::Status status_of(const Frame& frame, std::string_view text) {
  if (frame.code == absl::StatusCode::kOk) return absl::OkStatus();
  std::string message(text);
  for (char& c : message) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  if (message.empty()) {
    message = "the remote region is stale: its owner deregistered it during the transfer";
  }
  return absl::Status(frame.code, message);
}

}  // namespace

void TcpRail::on_received(ssize_t result, EventSink& sink) {
  if (result <= 0) {
    fail(lost(result == 0 ? "it closed the connection" : strerror(static_cast<int>(-result))));
    return;
  }
  rx_.received(static_cast<size_t>(result));
  parse(sink);
}

void TcpRail::parse(EventSink& sink) {
  while (!failing_) {
    if (in_payload_) {
      rx_.absorb();
      if (rx_.payload_left() > 0) return;
      in_payload_ = false;
      if (payload_frame_.type == FrameType::kWrite) {
        on_write_landed(sink);
      } else {
        on_read_data_landed();
      }
      continue;
    }
    const std::string_view bytes = rx_.buffered();
    if (bytes.size() < kHeaderBytes) return;
    absl::StatusOr<Frame> frame = decode_header(bytes.substr(0, kHeaderBytes));
    if (!frame.ok()) {
      fail(lost(std::string(frame.status().message())));
      return;
    }
    const size_t size = kHeaderBytes + frame->meta_bytes();
    if (bytes.size() < size) return;
    rx_.consume(size);
    handle(*frame, bytes.substr(kHeaderBytes, frame->meta_bytes()), sink);
  }
}

void TcpRail::handle(const Frame& frame, std::string_view meta, EventSink& sink) {
  switch (frame.type) {
    case FrameType::kWrite:
      return on_write(frame, meta, sink);
    case FrameType::kWriteAck:
      return on_write_ack(frame, frame_text(frame, meta), sink);
    case FrameType::kRead:
      return on_read(frame, meta);
    case FrameType::kReadData:
      return on_read_data(frame);
    case FrameType::kReadEnd:
      return on_read_end(frame, frame_text(frame, meta), sink);
    case FrameType::kCancelRead:
      return on_cancel_read(frame);
  }
}

// The same check as RegionTable::resolve(), which is asked once per frame instead of once per
// piece; it also words the refusal.
absl::Status TcpRail::map_pieces(const Frame& frame, Access want, absl::Span<iovec> out) {
  RegionTable& regions = shared_->context.regions;
  auto base = regions.resolve(frame.region, frame.generation, frame.key, want, 0, 0);
  if (!base.ok()) return base.status();
  const uint64_t size = regions.entries()[frame.region].size;
  for (uint32_t i = 0; i < frame.pieces; ++i) {
    const WirePiece& piece = wire_pieces_[i];
    if (piece.bytes > size || piece.offset > size - piece.bytes) {
      return regions
          .resolve(frame.region, frame.generation, frame.key, want, piece.offset, piece.bytes)
          .status();
    }
    out[i] = {*base + piece.offset, piece.bytes};
  }
  return absl::OkStatus();
}

void TcpRail::on_write(const Frame& frame, std::string_view meta, EventSink& sink) {
  if (absl::Status status = decode_pieces(frame, meta, absl::MakeSpan(wire_pieces_));
      !status.ok()) {
    fail(lost(std::string(status.message())));
    return;
  }
  if (frame.slice_offset == 0) {
    incoming_.active = true;
    incoming_.landed = 0;
    incoming_.error = absl::OkStatus();
  } else if (!incoming_.active || !(incoming_.frame.transfer == frame.transfer) ||
             incoming_.frame.slice != frame.slice || incoming_.landed != frame.slice_offset ||
             incoming_.frame.slice_bytes != frame.slice_bytes) {
    fail(lost("hostile or damaged WRITE frame: it continues no slice"));
    return;
  }
  incoming_.frame = frame;
  const std::string_view text = frame_text(frame, meta);
  incoming_.notify.assign(text.data(), text.size());
  if (frame.flags & kAbandoned) incoming_.error = absl::CancelledError("abandoned by its sender");
  if (frame.bytes == 0) {
    on_write_landed(sink);
    return;
  }
  if (incoming_.error.ok()) {
    incoming_.error = map_pieces(frame, Access::kRemoteWrite, absl::MakeSpan(mapped_));
  }
  in_payload_ = true;
  payload_frame_ = frame;
  rx_.start_payload(frame.bytes);
  if (!incoming_.error.ok()) return;
  for (uint32_t i = 0; i < frame.pieces; ++i) {
    rx_.add_piece(mapped_[i].iov_base, mapped_[i].iov_len);
  }
}

void TcpRail::on_write_landed(EventSink& sink) {
  const Frame frame = incoming_.frame;
  incoming_.landed += frame.bytes;
  if (!(frame.flags & kLast)) return;
  incoming_.active = false;
  if (incoming_.error.ok()) {
    sink.arrived(*this, {.transfer = frame.transfer,
                         .slice = frame.slice,
                         .slice_bytes = frame.slice_bytes,
                         .total_bytes = frame.total_bytes,
                         .counter_index = frame.counter,
                         .counter_generation = frame.counter_generation,
                         .increment = frame.increment,
                         .notify = incoming_.notify});
    if (failing_) return;
  }
  answer(FrameType::kWriteAck, frame, 0, incoming_.error);
}

TcpRail::Zombie* TcpRail::find_zombie(const Frame& frame) {
  for (Zombie& zombie : zombies_) {
    if (zombie.reads_open > 0 && zombie.id == frame.transfer && zombie.slice == frame.slice) {
      return &zombie;
    }
  }
  return nullptr;
}

void TcpRail::on_write_ack(const Frame& frame, std::string_view text, EventSink& sink) {
  Slot* slot = find_slot(frame, Op::kWrite);
  const bool all_sent =
      slot != nullptr && slot->begun && (slot->aborted || slot->framed == slot->bytes());
  if (!all_sent) {
    fail(lost("hostile or damaged WRITE_ACK frame: no such slice was sent"));
    return;
  }
  writes_of(*slot).remove(slots_.number_of(*slot));
  report(*slot, status_of(frame, text), sink);
}

void TcpRail::on_read(const Frame& frame, std::string_view meta) {
  absl::Status status = decode_pieces(frame, meta, absl::MakeSpan(wire_pieces_));
  if (!status.ok()) {
    fail(lost(std::string(status.message())));
    return;
  }
  uint8_t at = 0;
  while (at < kDepth && jobs_[at].live) ++at;
  if (at == kDepth) {
    fail(lost("hostile READ frame: too many reads at a time"));
    return;
  }
  Job& job = jobs_[at];
  job.pieces.resize(frame.pieces);
  status = map_pieces(frame, Access::kRemoteRead, absl::MakeSpan(job.pieces));
  if (!status.ok()) {
    answer(FrameType::kReadEnd, frame, frame.slice_offset, status);
    return;
  }
  job.live = true;
  job.frame = frame;
  answers_.push(at);
}

void TcpRail::on_cancel_read(const Frame& frame) {
  for (uint8_t at = 0; at < kDepth; ++at) {
    Job& job = jobs_[at];
    if (!job.live || !(job.frame.transfer == frame.transfer) || job.frame.slice != frame.slice) {
      continue;
    }
    bool batched = false;
    for (const BatchedJob& b : batched_) batched |= b.job == at;
    if (batched) continue;
    answers_.remove(at);
    job.live = false;
    answer(FrameType::kReadEnd, job.frame, job.frame.slice_offset,
           absl::CancelledError("cancelled"));
  }
}

void TcpRail::on_read_data(const Frame& frame) {
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr && find_zombie(frame) == nullptr) {
    fail(lost("hostile or damaged READ_DATA frame: no such slice was asked for"));
    return;
  }
  in_payload_ = true;
  payload_frame_ = frame;
  rx_.start_payload(frame.bytes);
  landing_slot_ = -1;
  if (slot == nullptr || !slot->error.ok()) return;  // to nowhere
  if (slot->received != frame.slice_offset || frame.bytes > slot->framed - slot->received) {
    fail(lost("hostile or damaged READ_DATA frame: it does not continue its slice"));
    return;
  }
  landing_slot_ = slots_.number_of(*slot);
  const TransferDescriptor& t = *slot->transfer;
  // Cut as the request was, so that the pieces are no more than one frame may have.
  TransferCursor cursor(t.local, t.remote_layout, slot->begin + slot->received,
                        slot->begin + slot->received + frame.bytes);
  Piece piece;
  uint32_t pieces = 0;
  for (; pieces < kMaxPieces && cursor.next(piece); ++pieces) {
    rx_.add_piece(t.local_base + piece.local_offset, piece.bytes);
  }
  if (cursor.remaining() > 0) {
    fail(lost("hostile or damaged READ_DATA frame: it answers more than one READ"));
  }
}

void TcpRail::on_read_data_landed() {
  if (landing_slot_ >= 0) slots_[landing_slot_].received += payload_frame_.bytes;
  landing_slot_ = -1;
}

void TcpRail::on_read_end(const Frame& frame, std::string_view text, EventSink& sink) {
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr) {
    Zombie* zombie = find_zombie(frame);
    if (zombie == nullptr) {
      fail(lost("hostile or damaged READ_END frame: no such slice was asked for"));
      return;
    }
    --zombie->reads_open;
    --reads_open_;
    return;
  }
  const absl::Status status = status_of(frame, text);
  if (slot->reads_open == 0 ||
      (status.ok() && slot->error.ok() && slot->received < frame.slice_offset)) {
    fail(lost("hostile or damaged READ_END frame: its bytes have not come"));
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
      fail(lost("hostile or damaged READ_END frame: bytes of the slice are missing"));
    }
  }
}

}  // namespace baton::tcp
