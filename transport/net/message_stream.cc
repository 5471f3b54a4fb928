// The message stream: sending and receiving short messages, keepalives, and why it ended.
#include "transport/net/message_stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"
#include "transport/net/endpoint.h"

namespace baton::net {

MessageStream::MessageStream(int fd, Poller& poller, const Options& options)
    : fd_(fd), poller_(poller), options_(options) {
  const Endpoint remote = peer_of(fd);
  peer_ = remote.text();
  const auto silence = options.silence / std::chrono::milliseconds(1);
  tune(fd, remote, {.congestion = "system", .user_timeout_ms = static_cast<int>(silence)});
  absl::Status status = poller_.add(fd_, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this);
  if (!status.ok()) close(std::move(status), false);
  ready = EPOLLIN;
}

MessageStream::~MessageStream() { close(absl::CancelledError("closed here"), false); }

void MessageStream::close(absl::Status why, bool gone) {
  if (fd_ < 0) return;
  flush();
  poller_.remove(fd_);
  ::close(fd_);
  fd_ = -1;
  why_ = std::move(why);
  gone_ = gone;
}

void MessageStream::ended(int error) {
  const bool network = error == ETIMEDOUT || error == EHOSTUNREACH || error == EHOSTDOWN ||
                       error == ENETUNREACH || error == ENETDOWN;
  close(
      absl::UnavailableError(network ? absl::StrCat("the TCP connection failed: ", strerror(error))
                                     : std::string("the peer closed the connection")),
      !network);
}

void MessageStream::send(std::string_view message) {
  if (fd_ < 0 || error_ != 0) return;
  put_number(out_, static_cast<uint32_t>(message.size()));
  out_.append(message);
  flush();
  if (out_.size() <= options_.max_waiting) return;
  close(absl::UnavailableError(
            absl::StrCat("the peer takes no messages: ", out_.size() >> 10, " KiB wait for it")),
        false);
}

void MessageStream::flush() {
  while (error_ == 0 && !out_.empty()) {
    const ssize_t n = ::send(fd_, out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      error_ = errno;
      ready |= EPOLLIN;
      return;
    }
    out_.erase(0, static_cast<size_t>(n));
  }
}

// A whole message, out of what is here.
std::optional<std::string_view> MessageStream::cut() {
  const std::string_view here = std::string_view(in_).substr(taken_);
  uint32_t bytes = 0;
  if (here.size() < sizeof bytes) return std::nullopt;
  std::memcpy(&bytes, here.data(), sizeof bytes);
  if (bytes > options_.max_message) {
    close(absl::UnavailableError(absl::StrCat("hostile or damaged bytes: a message of ", bytes,
                                              " bytes, and at most ", options_.max_message,
                                              " are allowed")),
          true);
    return std::nullopt;
  }
  if (here.size() - sizeof bytes < bytes) return std::nullopt;
  taken_ += sizeof bytes + bytes;
  return here.substr(sizeof bytes, bytes);
}

std::optional<std::string_view> MessageStream::next() {
  if (fd_ < 0 || (ready == 0 && taken_ == in_.size())) return std::nullopt;
  if ((ready & EPOLLOUT) != 0) {
    ready &= ~static_cast<uint32_t>(EPOLLOUT);
    flush();
  }
  while (fd_ >= 0) {
    if (const auto message = cut()) return message;
    if (fd_ < 0 || ready == 0) break;
    in_.erase(0, taken_);
    taken_ = 0;
    char bytes[4096];
    const ssize_t n = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      in_.append(bytes, static_cast<size_t>(n));
    } else if (n < 0 && errno == EAGAIN && error_ == 0) {
      ready &= static_cast<uint32_t>(EPOLLOUT);
      break;
    } else {
      ended(error_ != 0 ? error_ : n < 0 ? errno : 0);
    }
  }
  return std::nullopt;
}

}  // namespace baton::net
