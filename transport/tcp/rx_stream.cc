// Where the bytes of a rail go as they come in: the header buffer, their destination, or nowhere.
#include "transport/tcp/rx_stream.h"

#include <algorithm>
#include <cstring>

namespace baton::tcp {
void RxStream::start_payload(size_t bytes) {
  gap_ = std::clamp(gap_seen_, framed::kHeaderBytes, kBufferBytes / 2);
  gap_seen_ = 0;
  payload_left_ = bytes;
  bulk_ = bytes >= kBulk;
  stays_ = false;
  piece_ = pieces_ = 0;
}

void RxStream::add_piece(void* data, size_t bytes) {
  if (pieces_ > 0) {
    iovec& last = iov_[pieces_ - 1];
    if (static_cast<char*>(last.iov_base) + last.iov_len == data) {
      last.iov_len += bytes;
      return;
    }
  }
  iov_[pieces_++] = {data, bytes};
}

void RxStream::discard() { piece_ = pieces_ = 0; }

void RxStream::land(size_t bytes) {
  payload_left_ -= bytes;
  if (discarding()) return;
  while (bytes > 0) {
    iovec& at = iov_[piece_];
    const size_t step = std::min(bytes, at.iov_len);
    if (opener_.payload()) opener_.payload(at.iov_base, step);
    at.iov_base = static_cast<char*>(at.iov_base) + step;
    at.iov_len -= step;
    bytes -= step;
    if (at.iov_len == 0) ++piece_;
  }
}

// Copies up to `bytes` from the buffer to the pieces; 0 when the next piece's memory is gone.
size_t RxStream::copy_out(size_t bytes) {
  char* const from = buffer_ + begin_;
  if (stays_) {
    const size_t step = std::min(bytes, iov_[piece_].iov_len);
    std::memcpy(iov_[piece_].iov_base, from, step);
    return step;
  }
  // As many pieces as these bytes fill, the last of them cut for the call.
  size_t end = piece_;
  size_t filled = 0;
  while (end < pieces_ && filled < bytes) filled += iov_[end++].iov_len;
  const size_t excess = filled > bytes ? filled - bytes : 0;
  iov_[end - 1].iov_len -= excess;
  const size_t copied =
      memory_->buffers.copy_out(memory_->buffer, from, iov_ + piece_, end - piece_);
  iov_[end - 1].iov_len += excess;
  return copied;
}

bool RxStream::absorb() {
  while (payload_left_ > 0 && end_ > begin_) {
    size_t step = std::min(payload_left_, end_ - begin_);
    if (!discarding()) {
      step = copy_out(step);
      if (step == 0) return false;
    }
    land(step);
    begin_ += step;
  }
  return true;
}

void RxStream::fill(msghdr& message) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ > 0 && kBufferBytes - end_ < kBufferBytes / 2) {
    std::memmove(buffer_, buffer_ + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  message = {};
  char* tail = buffer_ + end_;
  const size_t room = kBufferBytes - end_;
  if (payload_left_ == 0) {
    // In bulk, only a little more than the next header: what follows it must not be copied twice.
    iov_[0] = {tail, std::min(room, bulk_ ? gap_ : kBulk)};
    message.msg_iov = iov_;
    message.msg_iovlen = 1;
    return;
  }
  if (discarding()) {
    iov_[0] = {nowhere_, std::min(payload_left_, kNowhereBytes)};
    message.msg_iov = iov_;
    message.msg_iovlen = 1;
    return;
  }
  iov_[pieces_] = {tail, std::min(room, bulk_ ? gap_ : kBulk)};
  message.msg_iov = iov_ + piece_;
  message.msg_iovlen = pieces_ - piece_ + 1;
}

void RxStream::received(size_t bytes) {
  const size_t payload = std::min(bytes, payload_left_);
  land(payload);
  end_ += bytes - payload;
}

}  // namespace baton::tcp
