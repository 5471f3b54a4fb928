// Where the bytes of a rail go as they come in: the header buffer, their destination, or nowhere.
#include "transport/tcp/rx_stream.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace baton::tcp {
namespace {

// Copies through the kernel, which looks where memcpy would crash. A system call is nothing to the
// rest of a large payload. Where the call is not allowed, memory has to be there.
bool copy_if_mapped(void* to, void* from, size_t bytes) {
  const iovec source{from, bytes};
  const iovec target{to, bytes};
  const ssize_t moved = process_vm_writev(getpid(), &source, 1, &target, 1, 0);
  if (moved < 0 && errno != EFAULT) {
    std::memcpy(to, from, bytes);
    return true;
  }
  return moved == static_cast<ssize_t>(bytes);
}

}  // namespace

void RxStream::start_payload(size_t bytes) {
  gap_ = std::clamp(gap_seen_, framed::kHeaderBytes, kBufferBytes / 2);
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
    if (opener_.payload()) opener_.payload(at.iov_base, step);
    at.iov_base = static_cast<char*>(at.iov_base) + step;
    at.iov_len -= step;
    bytes -= step;
    if (at.iov_len == 0) ++piece_;
  }
}

bool RxStream::absorb() {
  while (payload_left_ > 0 && end_ > begin_) {
    size_t step = std::min(payload_left_, end_ - begin_);
    if (!discarding()) {
      step = std::min(step, iov_[piece_].iov_len);
      char* const from = buffer_ + begin_;
      if (!bulk_) {
        std::memcpy(iov_[piece_].iov_base, from, step);
      } else if (!copy_if_mapped(iov_[piece_].iov_base, from, step)) {
        return false;
      }
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
