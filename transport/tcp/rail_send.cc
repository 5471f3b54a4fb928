// A tcp rail's outgoing side: which frame goes next, and how it is laid out for sendmsg.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/copies/fault_guard.h"
#include "transport/tcp/rail.h"

namespace baton::tcp {
namespace {

// Small pages that lie scattered cost sendmsg() a miss in the TLB and in the caches each, one after
// the other. Asked for while a batch is put together they come side by side. From 2 KiB on the
// processor's own prefetching does as well, or better (docs/history.md).
constexpr size_t kFetchedPiece = 1024;

void fetch_soon(const std::byte* piece, size_t bytes) {
  if (bytes > kFetchedPiece) return;
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(piece + at, 0, 2);
}

}  // namespace

void TcpRail::send_control(const framed::Frame& frame, std::string_view text) {
  if (frame.type != framed::FrameType::kWriteAck) at_once_ = true;
  const size_t at = control_.size();
  const size_t bytes = framed::kHeaderBytes + text.size();
  control_.resize(at + net::kSealBytes + bytes);
  char* const head = control_.data() + at + net::kSealPrefix;
  framed::encode_header(frame, head);
  text.copy(head + framed::kHeaderBytes, text.size());
  sealer_.head(control_.data() + at, bytes);
}

bool TcpRail::acks_wait() {
  return hold_.wait(shared_->round, shared_->now, data_to_send()) && !at_once_;
}

bool TcpRail::send() {
  if (broken_slot_ >= 0) return false;
  if (batch_.sent() && !acks_wait()) compose();
  if (batch_.sent()) return false;
  msghdr message;
  batch_.fill(message);
  const ssize_t sent = socket_.send(message, look_again(batch_fades_));
  if (sent == -EAGAIN) return false;
  if (sent == -EFAULT) {
    source_gone();
  } else if (sent < 0) {
    stalled_ |= sent == -ETIMEDOUT;
    fail(lost(strerror(static_cast<int>(-sent))));
  } else {
    batch_.advance(static_cast<size_t>(sent));
  }
  return true;
}

// Memory that was to be sent cannot be read any more. Its frame has promised bytes: an answer to a
// read is taken back behind zeros; a write ends with the connection, for its frame may say that the
// slice is complete. The peer hears of no more than it has, and what else was under way goes on
// over another connection.
void TcpRail::source_gone() {
  size_t at = batch_.next();
  while (at < batch_.vectors() && shared_->buffers->readable(batch_.vector(at))) ++at;
  for (const BatchedJob& job : batched_) {
    if (job.begin <= at && at < job.end) {
      return take_back_answer(job, absl::StatusCode::kFailedPrecondition);
    }
  }
  for (const BatchedWrite& write : batched_writes_) {
    if (write.begin > at || at >= write.end) continue;
    broken_slot_ = write.slot;
    slots_[write.slot].error = base::source_is_gone();
    return socket_.end();
  }
  fail(lost(strerror(EFAULT)));
}

// What the kernel has not taken yet of an aborted write: a batch at most. Where payload has tags it
// is sent from a sealed copy as it is.
void TcpRail::release_memory(Slot& slot) {
  for (BatchedWrite& write : batched_writes_) {
    if (&slots_[write.slot] != &slot) continue;
    write.copied = sealer_.payload() || batch_.copy_rest(write.begin, write.end);
  }
}

bool TcpRail::let_go(TransferId transfer) const {
  return std::none_of(batched_writes_.begin(), batched_writes_.end(), [&](const auto& write) {
    const Slot& slot = *(slots_.begin() + write.slot);
    return slot.live && slot.id == transfer && !write.copied && batch_.unsent_before(write.end);
  });
}

// The frame has promised bytes: send zeros, and take the promise back behind them.
void TcpRail::take_back_answer(const BatchedJob& batched, absl::StatusCode why) {
  const framed::Frame& asked = jobs_[batched.job].frame;
  batch_.blank(batched.begin, batched.end);
  framed::Frame end{.type = framed::FrameType::kReadEnd,
                    .code = why,
                    .transfer = asked.transfer,
                    .slice = asked.slice,
                    .slice_offset = asked.slice_offset + asked.bytes};
  framed::encode_header(end, batched.trailer + net::kSealPrefix);
  sealer_.head_again(batched.trailer, framed::kHeaderBytes, batched.number);
}

// Control frames first, then requests (they are small), then data: writes and answers in turn.
void TcpRail::compose() {
  for (const BatchedJob& batched : batched_) jobs_[batched.job].live = false;
  batched_.clear();
  batched_writes_.clear();
  batch_.clear();
  batch_fades_ = false;
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
  if (control_.empty()) at_once_ = false;
  return control_.empty();
}

// Small slices first, in turns, but never between two frames of one slice.
IndexQueue* TcpRail::next_writes() {
  for (IndexQueue* queue : {&urgent_, &writes_}) {
    if (!queue->empty() && slots_[queue->front()].framed > 0) return queue;
  }
  if (writes_.empty()) return urgent_.empty() ? nullptr : &urgent_;
  return urgent_.empty() || turns_.large_is_due() ? &writes_ : &urgent_;
}

// Payload of the next frame: from where it is, or, where it needs a tag, from a sealed copy.
void TcpRail::start_payload() {
  if (!sealer_.payload()) return;
  sealer_.start_payload();
  sealed_from_ = sealed_bytes_;
}

// False: there is nothing to be read.
bool TcpRail::add_payload(std::byte* data, size_t bytes, size_t header, bool stays) {
  if (!sealer_.payload()) {
    fetch_soon(data, bytes);                  // no fault where nothing is mapped
    batch_.add_payload(data, bytes, header);  // the kernel looks
    batch_fades_ |= !stays;
    return true;
  }
  char* const to = sealed_.data + sealed_bytes_;
  if (!stays && !shared_->sealing->copy_in(sealed_, to, data, bytes)) return false;
  sealer_.payload(stays ? static_cast<const void*>(data) : to, bytes, to);
  sealed_bytes_ += bytes;
  return true;
}

void TcpRail::forget_payload(const TxBatch::Mark& mark) {
  batch_.rewind(mark);
  sealed_bytes_ = sealed_from_;
}

void TcpRail::end_payload(size_t bytes) {
  if (!sealer_.payload() || bytes == 0) return;
  sealer_.end_payload(sealed_.data + sealed_bytes_);
  sealed_bytes_ += net::kSealTag;
  batch_.add_sealed(sealed_.data + sealed_from_, bytes);
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
  const TxBatch::Mark mark = batch_.mark();
  char* const place = batch_.next_header();
  char* const head = place + net::kSealPrefix;
  const size_t vector = batch_.open_header();
  const bool kept = context_.regions.stays(t.local_region);
  if (slot.aborted) {
    frame.flags = framed::kLast | framed::kAbandoned;
  } else {
    char* out = head + framed::kHeaderBytes;
    start_payload();
    bool there = true;
    framed::take_pieces({t.local, t.remote_layout, slot.begin + slot.framed, slot.end}, frame,
                        framed::kMaxPieces, most_payload(), out, [&](const Piece& piece) {
                          there = there && add_payload(t.local_base + piece.local_offset,
                                                       piece.bytes, vector, kept);
                        });
    if (!there) {  // nothing of this frame has been promised: the next one gives the slice up
      forget_payload(mark);
      slot.aborted = true;
      slot.error = base::source_is_gone();
      return true;
    }
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
  const size_t head_bytes = framed::kHeaderBytes + frame.meta_bytes() + net::kSealBytes;
  const size_t end = batch_.vectors();
  const bool copied = kept && !sealer_.payload() && batch_.commit_inlined(vector, head_bytes);
  if (!copied) batch_.commit_header(vector, head_bytes);
  if (!slot.aborted) {
    const size_t begin = copied ? batch_.vectors() : vector + 1;
    batched_writes_.push_back({queue->front(), begin, copied ? begin : end, copied});
  }
  slot.begun = true;
  if (queue == &urgent_) {
    turns_.small_went(frame.bytes, !writes_.empty());
  } else {
    turns_.large_went();
  }
  if (frame.flags & framed::kLast) {
    slot.said = true;
    queue->pop();
  }
  return true;
}

bool TcpRail::add_read() {
  if (reads_.empty() || reads_open_ == kMaxReads || !batch_.fits_frame()) return false;
  Slot& slot = slots_[reads_.front()];
  if (slot.framed < slot.bytes()) {
    char* const place = batch_.next_header();
    char* const head = place + net::kSealPrefix;
    const framed::Frame frame =
        ask(slot, framed::kMaxPieces, most_payload(), head + framed::kHeaderBytes);
    framed::encode_header(frame, head);
    sealer_.head(place, framed::kHeaderBytes + frame.meta_bytes());
    batch_.add_header(framed::kHeaderBytes + frame.meta_bytes() + net::kSealBytes);
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
  const TxBatch::Mark mark = batch_.mark();
  const size_t vector = batch_.open_header();
  char* const place = batch_.next_header();
  framed::encode_header(data, place + net::kSealPrefix);
  batch_.commit_header(vector, framed::kHeaderBytes + net::kSealBytes);
  start_payload();
  bool there = true;
  const bool kept = context_.regions.stays(job.frame.region);
  for (const iovec& piece : job.pieces) {
    there =
        there && add_payload(static_cast<std::byte*>(piece.iov_base), piece.iov_len, vector, kept);
  }
  if (!there) {
    forget_payload(mark);
    jobs_[at].live = false;
    add_end({.type = framed::FrameType::kReadEnd,
             .code = absl::StatusCode::kFailedPrecondition,
             .transfer = data.transfer,
             .slice = data.slice,
             .slice_offset = data.slice_offset});
    return true;
  }
  end_payload(data.bytes);
  sealer_.head(place, framed::kHeaderBytes);
  const size_t end = batch_.vectors();
  batched_.push_back({at, vector + 1, end, batch_.next_header(), sealer_.next()});
  add_end({.type = framed::FrameType::kReadEnd,
           .transfer = data.transfer,
           .slice = data.slice,
           .slice_offset = data.slice_offset + data.bytes});
  return true;
}

void TcpRail::add_end(const framed::Frame& frame) {
  char* const place = batch_.next_header();
  framed::encode_header(frame, place + net::kSealPrefix);
  sealer_.head(place, framed::kHeaderBytes);
  batch_.add_header(framed::kHeaderBytes + net::kSealBytes);
}

}  // namespace baton::tcp
