// A ucx rail's incoming side: every frame is checked before a byte of it moves, and lands where it
// belongs, all within one call: nothing that has been taken back can land later.
#include <algorithm>
#include <cstring>

#include "transport/base/copies/fault_guard.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {
namespace {

using framed::Frame;
using framed::FrameType;

}  // namespace

// The bytes are UCX's: of what has to be opened a copy is.
bool UcxRail::open(uint64_t number, std::string_view sealed, std::string_view& head,
                   std::string_view& payload) {
  if (window_.seen(number) || sealed.size() < net::kSealBytes) return false;
  uint32_t bytes = 0;
  std::memcpy(&bytes, sealed.data(), sizeof bytes);
  if (bytes > sealed.size() - net::kSealBytes) return false;
  opened_head_.assign(sealed.substr(0, bytes + net::kSealBytes));
  if (!opener_.open(opened_head_.data(), bytes, number)) return false;
  head = std::string_view(opened_head_).substr(net::kSealPrefix, bytes);
  payload = sealed.substr(bytes + net::kSealBytes);
  if (opener_.payload() && !payload.empty()) {
    if (payload.size() < net::kSealTag) return false;
    const char* const tag = payload.data() + payload.size() - net::kSealTag;
    opened_payload_.assign(payload.substr(0, payload.size() - net::kSealTag));
    opener_.start_payload(number);
    opener_.payload(opened_payload_.data(), opened_payload_.size());
    if (!opener_.end_payload(tag)) return false;
    payload = opened_payload_;
  }
  window_.add(number);
  return true;
}

void UcxRail::receive(std::string_view head, std::string_view payload, EventSink& sink) {
  if (closed_ || failing_) return;
  ++received_;
  endpoint_->silent = false;
  const auto frame = framed::decode_header(head.substr(0, framed::kHeaderBytes));
  if (!frame.ok()) {
    FramedRail::hostile(std::string(frame.status().message()));
    return;
  }
  if (head.size() != framed::kHeaderBytes + frame->meta_bytes() ||
      payload.size() != frame->payload_bytes()) {
    hostile("its length differs from its header's");
    return;
  }
  const std::string_view meta = head.substr(framed::kHeaderBytes);
  pieces_.resize(frame->pieces);
  if (frame->pieces > 0) {
    absl::Status status = framed::decode_pieces(*frame, meta, absl::MakeSpan(pieces_));
    if (!status.ok()) {
      FramedRail::hostile(std::string(status.message()));
      return;
    }
  }
  const std::string_view message = framed::frame_text(*frame, meta);
  switch (frame->type) {
    case FrameType::kWrite:
      return on_write(*frame, message, payload.data(), sink);
    case FrameType::kWriteAck:
      return on_write_ack(*frame, message, sink);
    case FrameType::kRead:
      return on_read(*frame, message);
    case FrameType::kReadData:
      return on_read_data(*frame, payload.data(), sink);
    case FrameType::kReadEnd:
      return on_read_end(*frame, message, sink);
    case FrameType::kCancelRead:
      return on_cancel_read(*frame);
    case FrameType::kGoodbye:
      return hostile("a goodbye belongs on the connection beside UCX");
  }
}

void UcxRail::on_write(const Frame& frame, std::string_view notify, const char* payload,
                       EventSink& sink) {
  Incoming* write = nullptr;
  for (Incoming& other : incoming_) {
    if (other.live && other.transfer == frame.transfer && other.slice == frame.slice) {
      write = &other;
      break;
    }
    if (!other.live && write == nullptr) write = &other;
  }
  if (write == nullptr) {
    hostile("more slices at a time than a rail takes");
    return;
  }
  if (!write->live) {
    write->live = true;
    write->ending = false;
    write->transfer = frame.transfer;
    write->slice = frame.slice;
    write->landed = 0;
    write->error = absl::OkStatus();
    write->notify.clear();
  }
  write->landed += frame.bytes;
  if (frame.flags & framed::kLast) {
    if (write->ending) {
      hostile("a slice that ends twice");
      return;
    }
    write->ending = true;
    write->last = frame;
    write->notify.assign(notify.data(), notify.size());
    if (frame.flags & framed::kAbandoned) {
      write->error.Update(absl::CancelledError("abandoned by its sender"));
    }
  }
  if (frame.bytes > 0 && write->error.ok()) {
    const auto base = resolve(frame, Access::kRemoteWrite, pieces_);
    write->error = base.status();
    if (base.ok() && !land(*base, payload, frame.region)) write->error = base::target_is_gone();
  }
  if (!write->ending) return;
  const uint64_t expected = write->last.slice_offset + write->last.bytes;
  if (write->landed < expected) return;
  write->live = false;
  if (write->landed > expected) {
    hostile("a slice with more bytes than its size");
    return;
  }
  const Frame& last = write->last;
  if (write->error.ok()) {
    arrived(last, write->notify, sink);
  }
  answer(FrameType::kWriteAck, last, write->error);
}

// False: some of the memory of these pieces is gone.
bool UcxRail::land(std::byte* base, const char* payload, uint32_t region) const {
  return guarded(region, [this, base, payload] {
    const char* from = payload;
    for (const framed::WirePiece& piece : pieces_) {
      std::memcpy(base + piece.offset, from, piece.bytes);
      from += piece.bytes;
    }
  });
}

void UcxRail::on_read(const Frame& frame, std::string_view) {
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& j) { return !j.live; });
  if (job == jobs_.end()) {
    hostile("too many reads at a time");
    return;
  }
  if (const auto base = resolve(frame, Access::kRemoteRead, pieces_); !base.ok()) {
    answer(FrameType::kReadEnd, frame, base.status());
    return;
  }
  job->live = true;
  job->frame = frame;
  job->order = ++order_;
  job->answered = job->piece = job->piece_sent = 0;
  job->pieces.reserve(kMaxPieces);
  job->pieces.assign(pieces_.begin(), pieces_.end());
  ++jobs_live_;
}

void UcxRail::on_read_data(const Frame& frame, const char* payload, EventSink& sink) {
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr || !slot->error.ok()) return;  // taken back meanwhile
  if (frame.slice_offset > slot->framed || frame.bytes > slot->framed - frame.slice_offset ||
      frame.bytes > slot->bytes() - slot->received) {
    hostile("bytes that were not asked for");
    return;
  }
  const TransferDescriptor& t = *slot->transfer;
  const size_t begin = slot->begin + frame.slice_offset;
  TransferCursor cursor(t.local, t.remote_layout, begin, begin + frame.bytes);
  const bool there = guarded(t.local_region, [&t, &cursor, payload] {
    const char* from = payload;
    for (Piece piece; cursor.next(piece); from += piece.bytes) {
      std::memcpy(t.local_base + piece.local_offset, from, piece.bytes);
    }
  });
  if (!there) {  // asks for no more of it; it ends with the answer to what it has asked for
    slot->error = base::target_is_gone();
    return;
  }
  slot->received += frame.bytes;
  end_read(*slot, sink);
}

void UcxRail::on_read_end(const Frame& frame, std::string_view message, EventSink& sink) {
  if (reads_open_ == 0) {
    hostile("it answers what was not asked for");
    return;
  }
  --reads_open_;
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr) return;  // taken back meanwhile
  if (slot->reads_open == 0) {
    hostile("it answers what was not asked for");
    return;
  }
  --slot->reads_open;
  slot->error.Update(framed::status_of(frame, message));
  end_read(*slot, sink);
}

// A read has ended when every request is answered and, if all went well, every byte is here.
void UcxRail::end_read(Slot& slot, EventSink& sink) {
  if (slot.reads_open > 0) return;
  if (!slot.error.ok() || slot.received == slot.bytes()) report(slot, slot.error, sink);
}

void UcxRail::on_cancel_read(const Frame& frame) {
  for (Job& job : jobs_) {
    if (!job.live || !(job.frame.transfer == frame.transfer) || job.frame.slice != frame.slice) {
      continue;
    }
    job.live = false;
    --jobs_live_;
    answer(FrameType::kReadEnd, job.frame, absl::CancelledError("cancelled by its initiator"));
  }
}

}  // namespace baton::ucx
