// Frames over a non-blocking socket.
#include "verbs/control.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/wire.h"

namespace baton::verbs {

Control::Control(int fd, tcp::Poller& poller) : fd_(fd), poller_(poller) {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  const int seconds = 10;
  setsockopt(fd_, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  setsockopt(fd_, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  absl::Status status = poller_.add(fd_, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this);
  if (!status.ok()) close(std::move(status), true);
  ready = EPOLLIN | EPOLLOUT;
}

Control::~Control() { close(absl::CancelledError("closed here"), false); }

void Control::close(absl::Status why, bool gone) {
  if (fd_ < 0) return;
  flush();
  if (fd_ < 0) return;
  poller_.remove(fd_);
  ::close(fd_);
  fd_ = -1;
  why_ = std::move(why);
  gone_ = gone;
}

void Control::failed(int error) {
  out_.clear();
  const bool network =
      error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
  close(absl::UnavailableError(
            network ? absl::StrCat("the control connection failed: ", strerror(error))
                    : std::string("the peer closed the connection")),
        !network);
}

void Control::send(std::string_view message) {
  if (fd_ < 0) return;
  put_number(out_, static_cast<uint32_t>(message.size()));
  out_.append(message);
  flush();
  if (out_.size() > kMaxWaiting) failed(ETIMEDOUT);
}

void Control::flush() {
  while (fd_ >= 0 && !out_.empty()) {
    const ssize_t n = ::send(fd_, out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      ready &= ~static_cast<uint32_t>(EPOLLOUT);
      return;
    }
    if (n < 0) return failed(errno);
    out_.erase(0, static_cast<size_t>(n));
  }
}

bool Control::progress(const std::function<absl::Status(const Message&)>& handler) {
  if (fd_ < 0 || ready == 0) return false;
  if (ready & EPOLLOUT) flush();
  bool any = false;
  int end = -1;  // errno of the end of the stream, 0 for an orderly one
  while (fd_ >= 0 && (ready & ~static_cast<uint32_t>(EPOLLOUT)) != 0) {
    char bytes[4096];
    const ssize_t n = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      ready = 0;
      break;
    }
    if (n <= 0) {
      end = n == 0 ? 0 : errno;
      break;
    }
    any = true;
    in_.append(bytes, static_cast<size_t>(n));
  }
  if (fd_ >= 0) ready &= ~static_cast<uint32_t>(EPOLLOUT);
  size_t at = 0;
  while (fd_ >= 0 && in_.size() - at >= sizeof(uint32_t)) {
    uint32_t length = 0;
    std::memcpy(&length, in_.data() + at, sizeof length);
    if (length < kHeaderBytes || length > kMessageBytes) {
      close(absl::InvalidArgumentError("the peer sent a frame of an impossible length"), true);
      break;
    }
    if (in_.size() - at - sizeof length < length) break;
    auto message = decode_message(std::string_view(in_).substr(at + sizeof length, length));
    absl::Status status = message.ok() ? handler(*message) : message.status();
    if (!status.ok()) close(std::move(status), true);
    at += sizeof length + length;
  }
  in_.erase(0, at);
  if (end >= 0 && fd_ >= 0) failed(end);
  return any || end >= 0;
}

}  // namespace baton::verbs
