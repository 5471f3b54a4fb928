// A ucx rail's incoming side: every frame is checked before a byte of it moves, and lands where it
// belongs, all within one call: nothing that has been taken back can land later.
#include <algorithm>
#include <cstring>

#include "absl/strings/ascii.h"
#include "transport/ucx/rail.h"

namespace baton::ucx {
namespace {

using tcp::Frame;
using tcp::FrameType;

// What a peer says, fit for messages and terminals.
absl::Status status_of(const Frame& frame, std::string_view message) {
  if (frame.code == absl::StatusCode::kOk) return absl::OkStatus();
  std::string out(message);
  for (char& c : out) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::Status(frame.code, out);
}

}  // namespace

void UcxRail::receive(std::string_view bytes, EventSink& sink) {
  if (closed_ || failing_) return;
  ++moved_;
  endpoint_->silent = false;
  const auto frame = tcp::decode_header(bytes.substr(0, tcp::kHeaderBytes));
  if (!frame.ok()) {
    fail(lost(std::string(frame.status().message())));
    return;
  }
  bytes.remove_prefix(tcp::kHeaderBytes);
  if (bytes.size() != frame->meta_bytes() + frame->payload_bytes()) {
    fail(hostile("its length is not what it says"));
    return;
  }
  const std::string_view meta = bytes.substr(0, frame->meta_bytes());
  const char* payload = bytes.data() + meta.size();
  pieces_.resize(frame->pieces);
  if (frame->pieces > 0) {
    absl::Status status = tcp::decode_pieces(*frame, meta, absl::MakeSpan(pieces_));
    if (!status.ok()) {
      fail(lost(std::string(status.message())));
      return;
    }
  }
  const std::string_view message = tcp::frame_text(*frame, meta);
  switch (frame->type) {
    case FrameType::kWrite:
      return on_write(*frame, message, payload, sink);
    case FrameType::kWriteAck:
      return on_write_ack(*frame, message, sink);
    case FrameType::kRead:
      return on_read(*frame, message);
    case FrameType::kReadData:
      return on_read_data(*frame, payload, sink);
    case FrameType::kReadEnd:
      return on_read_end(*frame, message, sink);
    case FrameType::kCancelRead:
      return on_cancel_read(*frame);
  }
}

// RegionTable::resolve() once per frame, and the same check of bounds for every piece; it also
// words the refusal. Returns the base of the region.
absl::StatusOr<std::byte*> UcxRail::resolve(const Frame& frame, Access want,
                                            const std::vector<tcp::WirePiece>& pieces) {
  RegionTable& regions = shared_->context.regions;
  auto base = regions.resolve(frame.region, frame.generation, frame.key, want, 0, 0);
  if (!base.ok()) return base;
  const uint64_t size = regions.entries()[frame.region].size;
  for (const tcp::WirePiece& piece : pieces) {
    if (piece.bytes > size || piece.offset > size - piece.bytes) {
      return regions.resolve(frame.region, frame.generation, frame.key, want, piece.offset,
                             piece.bytes);
    }
  }
  return base;
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
    fail(hostile("more slices at a time than a rail takes"));
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
  if (frame.flags & tcp::kLast) {
    if (write->ending) {
      fail(hostile("a slice that ends twice"));
      return;
    }
    write->ending = true;
    write->last = frame;
    write->notify.assign(notify.data(), notify.size());
    if (frame.flags & tcp::kAbandoned) {
      write->error.Update(absl::CancelledError("abandoned by its sender"));
    }
  }
  if (frame.bytes > 0 && write->error.ok()) {
    const auto base = resolve(frame, Access::kRemoteWrite, pieces_);
    write->error = base.status();
    for (size_t i = 0; base.ok() && i < pieces_.size(); ++i) {
      std::memcpy(*base + pieces_[i].offset, payload, pieces_[i].bytes);
      payload += pieces_[i].bytes;
    }
  }
  if (!write->ending) return;
  const uint64_t expected = write->last.slice_offset + write->last.bytes;
  if (write->landed < expected) return;
  write->live = false;
  if (write->landed > expected) {
    fail(hostile("a slice with more bytes than it has"));
    return;
  }
  const Frame& last = write->last;
  if (write->error.ok()) {
    sink.arrived(*this, {.transfer = last.transfer,
                         .slice = last.slice,
                         .slice_bytes = last.slice_bytes,
                         .total_bytes = last.total_bytes,
                         .counter_index = last.counter,
                         .counter_generation = last.counter_generation,
                         .increment = last.increment,
                         .notify = write->notify});
  }
  answer(FrameType::kWriteAck, last, write->error);
}

void UcxRail::on_write_ack(const Frame& frame, std::string_view message, EventSink& sink) {
  Slot* slot = find_slot(frame, Op::kWrite);
  if (slot == nullptr || !slot->said) {
    fail(hostile("it acknowledges what was not sent"));
    return;
  }
  report(*slot, status_of(frame, message), sink);
}

void UcxRail::on_read(const Frame& frame, std::string_view) {
  const auto job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& j) { return !j.live; });
  if (job == jobs_.end()) {
    fail(hostile("too many reads at a time"));
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
    fail(hostile("bytes that were not asked for"));
    return;
  }
  const TransferDescriptor& t = *slot->transfer;
  const size_t begin = slot->begin + frame.slice_offset;
  TransferCursor cursor(t.local, t.remote_layout, begin, begin + frame.bytes);
  for (Piece piece; cursor.next(piece); payload += piece.bytes) {
    std::memcpy(t.local_base + piece.local_offset, payload, piece.bytes);
  }
  slot->received += frame.bytes;
  end_read(*slot, sink);
}

void UcxRail::on_read_end(const Frame& frame, std::string_view message, EventSink& sink) {
  if (reads_open_ == 0) {
    fail(hostile("it answers what was not asked for"));
    return;
  }
  --reads_open_;
  Slot* slot = find_slot(frame, Op::kRead);
  if (slot == nullptr) return;  // taken back meanwhile
  if (slot->reads_open == 0) {
    fail(hostile("it answers what was not asked for"));
    return;
  }
  --slot->reads_open;
  slot->error.Update(status_of(frame, message));
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
