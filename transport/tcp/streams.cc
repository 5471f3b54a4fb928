// The two byte streams of a rail.
#include <cstring>

#include "transport/tcp/rx_stream.h"
#include "transport/tcp/tx_batch.h"

namespace baton::tcp {
namespace {

char zeros[kMaxPayload];  // never written, so it costs one page

}  // namespace

void TxBatch::blank(size_t begin, size_t end) {
  for (size_t i = std::max(begin, next_); i < end; ++i) iov_[i].iov_base = zeros;
}

void RxStream::start_payload(size_t bytes) {
  gap_ = std::clamp(gap_seen_, kHeaderBytes, kBufferBytes / 2);
  gap_seen_ = 0;
  payload_left_ = bytes;
  bulk_ = bytes >= kBulk;
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
    at.iov_base = static_cast<char*>(at.iov_base) + step;
    at.iov_len -= step;
    bytes -= step;
    if (at.iov_len == 0) ++piece_;
  }
}

void RxStream::absorb() {
  while (payload_left_ > 0 && end_ > begin_) {
    size_t step = std::min(payload_left_, end_ - begin_);
    if (!discarding()) {
      step = std::min(step, iov_[piece_].iov_len);
      std::memcpy(iov_[piece_].iov_base, buffer_.get() + begin_, step);
    }
    land(step);
    begin_ += step;
  }
}

void RxStream::fill(msghdr& message) {
  if (begin_ == end_) begin_ = end_ = 0;
  if (begin_ > 0 && kBufferBytes - end_ < kBufferBytes / 2) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  message = {};
  char* tail = buffer_.get() + end_;
  const size_t room = kBufferBytes - end_;
  if (payload_left_ == 0) {
    // In bulk, only a little more than the next header: what follows it must not be copied twice.
    iov_[0] = {tail, std::min(room, bulk_ ? gap_ : kBulk)};
    message.msg_iov = iov_.data();
    message.msg_iovlen = 1;
    return;
  }
  if (discarding()) {
    iov_[0] = {nowhere_, std::min(payload_left_, kNowhereBytes)};
    message.msg_iov = iov_.data();
    message.msg_iovlen = 1;
    return;
  }
  iov_[pieces_] = {tail, std::min(room, bulk_ ? gap_ : kBulk)};
  message.msg_iov = iov_.data() + piece_;
  message.msg_iovlen = pieces_ - piece_ + 1;
}

void RxStream::received(size_t bytes) {
  const size_t payload = std::min(bytes, payload_left_);
  land(payload);
  end_ += bytes - payload;
}

}  // namespace baton::tcp
