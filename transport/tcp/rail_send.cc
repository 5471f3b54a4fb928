// A tcp rail's outgoing side: which frame goes next, and how it is laid out for sendmsg.
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {
namespace {

// Encodes at `out` what the cursor yields, as far as one frame goes (which is as many pieces as a
// receiver can land at once), and hands every piece to `each`. Pieces that follow each other at the
// target become one there.
template <typename Each>
void take_pieces(TransferCursor cursor, framed::Frame& frame, size_t most, char* out,
                 const Each& each) {
  framed::WirePiece wire;
  Piece piece;
  for (uint32_t n = 0;
       n < framed::kMaxPieces && frame.bytes < most && cursor.next(piece, most - frame.bytes);
       ++n) {
    each(piece);
    frame.bytes += static_cast<uint32_t>(piece.bytes);
    if (frame.pieces > 0 && wire.offset + wire.bytes == piece.remote_offset) {
      wire.bytes += static_cast<uint32_t>(piece.bytes);
    } else {
      wire = {piece.remote_offset, static_cast<uint32_t>(piece.bytes)};
      ++frame.pieces;
    }
    framed::encode_piece(wire, out + (frame.pieces - 1) * framed::kPieceBytes);
  }
}

}  // namespace

void TcpRail::send_control(const framed::Frame& frame, std::string_view text) {
  const size_t at = control_.size();
  const size_t bytes = framed::kHeaderBytes + text.size();
  control_.resize(at + net::kSealBytes + bytes);
  char* const head = control_.data() + at + net::kSealPrefix;
  framed::encode_header(frame, head);
  text.copy(head + framed::kHeaderBytes, text.size());
  sealer_.head(control_.data() + at, bytes);
}

bool TcpRail::send() {
  if (batch_.sent()) compose();
  if (batch_.sent()) return false;
  msghdr message;
  batch_.fill(message);
  const ssize_t sent = socket_.send(message);
  if (sent == -EAGAIN) return false;
  if (sent < 0) {
    fail(lost(strerror(static_cast<int>(-sent))));
  } else {
    batch_.advance(static_cast<size_t>(sent));
  }
  return true;
}

// Control frames first, then requests (they are small), then data: writes and answers in turn.
void TcpRail::compose() {
  for (const BatchedJob& batched : batched_) jobs_[batched.job].live = false;
  batched_.clear();
  batch_.clear();
  sealed_bytes_ = 0;
  if (!add_control()) return;
  while (add_read()) {
  }
  while (batch_.payload() < kBatchPayload) {
    answers_first_ = !answers_first_;
    if (!(answers_first_ ? add_answer() || add_write() : add_write() || add_answer())) break;
  }
}

// False when control frames are left over: nothing may come between them.
bool TcpRail::add_control() {
  const size_t bytes = std::min(control_.size(), batch_.arena_left());
  if (bytes == 0) return true;
  std::memcpy(batch_.next_header(), control_.data(), bytes);
  batch_.add_header(bytes);
  control_.erase(0, bytes);
  return control_.empty();
}

// Small slices first, but never between two frames of one slice.
IndexQueue* TcpRail::next_writes() {
  for (IndexQueue* queue : {&urgent_, &writes_}) {
    if (!queue->empty() && slots_[queue->front()].framed > 0) return queue;
  }
  if (!urgent_.empty()) return &urgent_;
  return writes_.empty() ? nullptr : &writes_;
}

// Payload of the next frame: from where it is, or, where it needs a tag, from a sealed copy.
void TcpRail::start_payload() {
  if (!sealer_.payload()) return;
  sealer_.start_payload();
  sealed_from_ = sealed_bytes_;
}

void TcpRail::add_payload(std::byte* data, size_t bytes, size_t header) {
  if (!sealer_.payload()) return batch_.add_payload(data, bytes, header);
  sealer_.payload(data, bytes, sealed_.get() + sealed_bytes_);
  sealed_bytes_ += bytes;
}

void TcpRail::end_payload(size_t bytes) {
  if (!sealer_.payload() || bytes == 0) return;
  sealer_.end_payload(sealed_.get() + sealed_bytes_);
  sealed_bytes_ += net::kSealTag;
  batch_.add_sealed(sealed_.get() + sealed_from_, bytes);
}

bool TcpRail::add_write() {
  IndexQueue* queue = next_writes();
  if (queue == nullptr || !batch_.fits_frame()) return false;
  Slot& slot = slots_[queue->front()];
  const TransferDescriptor& t = *slot.transfer;
  framed::Frame frame{.type = framed::FrameType::kWrite,
                      .transfer = slot.id,
                      .slice = slot.slice,
                      .slice_offset = slot.framed,
                      .slice_bytes = slot.bytes(),
                      .total_bytes = t.bytes};
  char* const place = batch_.next_header();
  char* const head = place + net::kSealPrefix;
  const size_t vector = batch_.open_header();
  if (slot.aborted) {
    frame.flags = framed::kLast | framed::kAbandoned;
  } else {
    char* out = head + framed::kHeaderBytes;
    start_payload();
    take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame,
                most_payload(), out, [&](const Piece& piece) {
                  add_payload(t.local_base + piece.local_offset, piece.bytes, vector);
                });
    end_payload(frame.bytes);
    if (frame.pieces > 0) {
      frame.region = t.remote.index;
      frame.generation = t.remote.generation;
      frame.key = t.remote.key;
    }
    slot.framed += frame.bytes;
    if (slot.framed == slot.bytes()) {
      frame.flags = framed::kLast;
      if (slot.end == t.bytes && !t.notify.empty()) {
        frame.text = static_cast<uint32_t>(t.notify.size());
        std::memcpy(out + frame.pieces * framed::kPieceBytes, t.notify.data(), t.notify.size());
      }
    }
    frame.counter = t.counter.index;
    frame.counter_generation = t.counter.generation;
    frame.increment = t.increment;
  }
  framed::encode_header(frame, head);
  sealer_.head(place, framed::kHeaderBytes + frame.meta_bytes());
  batch_.commit_header(vector, framed::kHeaderBytes + frame.meta_bytes() + net::kSealBytes);
  slot.begun = true;
  if (frame.flags & framed::kLast) {
    slot.said = true;
    queue->pop();
  }
  return true;
}

bool TcpRail::add_read() {
  if (reads_.empty() || reads_open_ == kMaxReads || !batch_.fits_frame()) return false;
  Slot& slot = slots_[reads_.front()];
  const TransferDescriptor& t = *slot.transfer;
  if (slot.framed < slot.bytes()) {
    framed::Frame frame{.type = framed::FrameType::kRead,
                        .transfer = slot.id,
                        .slice = slot.slice,
                        .region = t.remote.index,
                        .generation = t.remote.generation,
                        .key = t.remote.key,
                        .slice_offset = slot.framed};
    char* const place = batch_.next_header();
    char* const head = place + net::kSealPrefix;
    take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame,
                most_payload(), head + framed::kHeaderBytes, [](const Piece&) {});
    framed::encode_header(frame, head);
    sealer_.head(place, framed::kHeaderBytes + frame.meta_bytes());
    batch_.add_header(framed::kHeaderBytes + frame.meta_bytes() + net::kSealBytes);
    slot.framed += frame.bytes;
    slot.begun = true;
    ++slot.reads_open;
    ++reads_open_;
  }
  if (slot.framed == slot.bytes()) reads_.pop();
  return true;
}

bool TcpRail::add_answer() {
  if (answers_.empty() || !batch_.fits_frame(framed::kHeaderBytes + net::kSealBytes)) {
    return false;
  }
  const uint8_t at = answers_.front();
  answers_.pop();
  const Job& job = jobs_[at];
  framed::Frame data{.type = framed::FrameType::kReadData,
                     .transfer = job.frame.transfer,
                     .slice = job.frame.slice,
                     .bytes = job.frame.bytes,
                     .slice_offset = job.frame.slice_offset};
  const size_t vector = batch_.open_header();
  char* const place = batch_.next_header();
  framed::encode_header(data, place + net::kSealPrefix);
  batch_.commit_header(vector, framed::kHeaderBytes + net::kSealBytes);
  start_payload();
  for (const iovec& piece : job.pieces) {
    add_payload(static_cast<std::byte*>(piece.iov_base), piece.iov_len, vector);
  }
  end_payload(data.bytes);
  sealer_.head(place, framed::kHeaderBytes);
  const size_t end = batch_.vectors();
  framed::Frame trailer{.type = framed::FrameType::kReadEnd,
                        .transfer = data.transfer,
                        .slice = data.slice,
                        .slice_offset = data.slice_offset + data.bytes};
  char* const trailing = batch_.next_header();
  framed::encode_header(trailer, trailing + net::kSealPrefix);
  batched_.push_back({at, vector + 1, end, trailing, sealer_.next()});
  sealer_.head(trailing, framed::kHeaderBytes);
  batch_.add_header(framed::kHeaderBytes + net::kSealBytes);
  return true;
}

}  // namespace baton::tcp
