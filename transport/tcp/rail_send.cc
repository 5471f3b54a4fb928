// A tcp rail's outgoing side: which frame goes next, and how it is laid out for sendmsg.
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {
namespace {

// Once a batch holds this much payload it goes out: acknowledgements must not wait long.
constexpr size_t kBatchPayload = 256 << 10;

// Encodes at `out` what the cursor yields, as far as one frame goes (which is as many pieces as a
// receiver can land at once), and hands every piece to `each`. Pieces that follow each other at the
// target become one there.
template <typename Each>
void take_pieces(TransferCursor cursor, framed::Frame& frame, char* out, const Each& each) {
  framed::WirePiece wire;
  Piece piece;
  for (uint32_t n = 0; n < framed::kMaxPieces && frame.bytes < framed::kMaxPayload &&
                       cursor.next(piece, framed::kMaxPayload - frame.bytes);
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
  control_.resize(at + framed::kHeaderBytes);
  framed::encode_header(frame, control_.data() + at);
  control_.append(text);
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
  char* head = batch_.next_header();
  const size_t vector = batch_.open_header();
  if (slot.aborted) {
    frame.flags = framed::kLast | framed::kAbandoned;
  } else {
    char* out = head + framed::kHeaderBytes;
    take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame, out,
                [&](const Piece& piece) {
                  batch_.add_payload(t.local_base + piece.local_offset, piece.bytes, vector);
                });
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
  batch_.commit_header(vector, framed::kHeaderBytes + frame.meta_bytes());
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
    char* head = batch_.next_header();
    take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame,
                head + framed::kHeaderBytes, [](const Piece&) {});
    framed::encode_header(frame, head);
    batch_.add_header(framed::kHeaderBytes + frame.meta_bytes());
    slot.framed += frame.bytes;
    slot.begun = true;
    ++slot.reads_open;
    ++reads_open_;
  }
  if (slot.framed == slot.bytes()) reads_.pop();
  return true;
}

bool TcpRail::add_answer() {
  if (answers_.empty() || !batch_.fits_frame(framed::kHeaderBytes)) return false;
  const uint8_t at = answers_.front();
  answers_.pop();
  const Job& job = jobs_[at];
  framed::Frame data{.type = framed::FrameType::kReadData,
                     .transfer = job.frame.transfer,
                     .slice = job.frame.slice,
                     .bytes = job.frame.bytes,
                     .slice_offset = job.frame.slice_offset};
  const size_t vector = batch_.open_header();
  framed::encode_header(data, batch_.next_header());
  batch_.commit_header(vector, framed::kHeaderBytes);
  for (const iovec& piece : job.pieces) {
    batch_.add_payload(static_cast<std::byte*>(piece.iov_base), piece.iov_len, vector);
  }
  const size_t end = batch_.vectors();
  framed::Frame trailer{.type = framed::FrameType::kReadEnd,
                        .transfer = data.transfer,
                        .slice = data.slice,
                        .slice_offset = data.slice_offset + data.bytes};
  char* place = batch_.next_header();
  framed::encode_header(trailer, place);
  batch_.add_header(framed::kHeaderBytes);
  batched_.push_back({at, vector + 1, end, place});
  return true;
}

}  // namespace baton::tcp
