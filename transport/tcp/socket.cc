// Moves a rail's bytes with non-blocking sendmsg and recvmsg.
#include "transport/tcp/socket.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace baton::tcp {
namespace {

size_t bytes_of(const msghdr& message) {
  size_t bytes = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) bytes += message.msg_iov[i].iov_len;
  return bytes;
}

}  // namespace

absl::Status Socket::watch(void* owner) {
  watched_.owner = owner;
  watched_.ready = EPOLLIN | EPOLLOUT;
  return poller_.add(fd_, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, watched_);
}

void Socket::close() {
  if (fd_ < 0) return;
  poller_.remove(fd_);
  ::close(fd_);
  fd_ = -1;
}

void Socket::end() { ::shutdown(fd_, SHUT_WR); }

void Socket::reset_on_close() {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
}

// errno of a connection that has failed; 0: it stands, or may be read to its end.
int Socket::error() {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
  // A reset behind the peer's end(): it did not want what we sent, but its own words are whole.
  if (error == EPIPE) ended_ = true;
  if (ended_) return 0;
  if (error == 0 && (watched_.ready & kGone)) error = ECONNRESET;
  if (error != 0) watched_.ready |= kGone;  // the kernel says it once
  return error;
}

ssize_t Socket::receive(msghdr& message, Time look_again) {
  // recvmsg() would hand out what lies in the buffer before it tells of a reset, so it is asked for
  // that first, each time: the poller's word may be older than the reset, unless nothing has been
  // done since.
  const bool fresh = std::exchange(direct_, false) || poller_.take_fresh();
  const bool known = fresh && (watched_.ready & kGone) == 0;
  if (const int failed = known ? 0 : error(); failed != 0) return -failed;
  // One run of bytes needs no message: small calls are sooner over.
  const iovec& first = message.msg_iov[0];
  const ssize_t moved = message.msg_iovlen == 1
                            ? recv(fd_, first.iov_base, first.iov_len, MSG_DONTWAIT)
                            : recvmsg(fd_, &message, MSG_DONTWAIT);
  return account(moved, message, look_again, in_);
}

ssize_t Socket::send(const msghdr& message, Time look_again) {
  if (watched_.ready & kGone) {
    const int failed = error();
    if (failed != 0) return -failed;
  }
  poller_.take_fresh();  // sending takes time
  constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
  const iovec& first = message.msg_iov[0];
  const ssize_t moved = message.msg_iovlen == 1 ? ::send(fd_, first.iov_base, first.iov_len, kFlags)
                                                : sendmsg(fd_, &message, kFlags);
  const ssize_t sent = account(moved, message, look_again, out_);
  if (sent != -EPIPE) return sent;
  ended_ = true;  // the peer takes nothing any more; its last words may still be unread
  return -EAGAIN;
}

ssize_t Socket::account(ssize_t moved, const msghdr& message, Time look_again,
                        Direction& direction) {
  direction.look_again = kNever;
  if (moved < 0) {
    const int why = errno == EWOULDBLOCK || errno == EINTR ? EAGAIN : errno;
    if (why == EAGAIN && errno != EINTR) watched_.ready &= ~direction.bit;
    return -why;
  }
  if (moved > 0 && static_cast<size_t>(moved) < bytes_of(message)) {
    watched_.ready &= ~direction.bit;
    direction.look_again = look_again;
  }
  return moved;
}

}  // namespace baton::tcp
