// Steers a rail's incoming bytes: to the header buffer, to their destination, or to nowhere.
#include "transport/tcp/rx_stream.h"

#include <algorithm>
#include <cstring>

#include "transport/base/copies/fault_guard.h"

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

// The kernel has put these bytes there, but the memory may have gone since. They are opened in a
// copy, because a cipher is no code that a fault may end in the middle.
bool RxStream::open(void* data, size_t bytes) {
  if (stays_) {
    opener_.payload(data, bytes);
    return true;
  }
  char copy[kOpened];
  for (size_t done = 0; done < bytes; done += sizeof copy) {
    char* const at = static_cast<char*>(data) + done;
    const size_t step = std::min(bytes - done, sizeof copy);
    if (!base::guarded([&copy, at, step] { std::memcpy(copy, at, step); })) return false;
    opener_.payload(copy, step);
    if (opener_.protection() == net::Protection::kEncrypt &&
        !base::guarded([&copy, at, step] { std::memcpy(at, copy, step); })) {
      return false;
    }
  }
  return true;
}

bool RxStream::land(size_t bytes) {
  payload_left_ -= bytes;
  if (discarding()) return true;
  while (bytes > 0) {
    iovec& at = iov_[piece_];
    const size_t step = std::min(bytes, at.iov_len);
    if (opener_.payload() && !open(at.iov_base, step)) return false;
    at.iov_base = static_cast<char*>(at.iov_base) + step;
    at.iov_len -= step;
    bytes -= step;
    if (at.iov_len == 0) ++piece_;
  }
  return true;
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
    begin_ += step;
    if (!land(step)) return false;
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

bool RxStream::received(size_t bytes) {
  const size_t payload = std::min(bytes, payload_left_);
  end_ += bytes - payload;
  return land(payload);
}

}  // namespace baton::tcp
