// The message stream: sending and receiving short messages, keepalives, and why it ended.
#include "transport/net/message_stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/net/endpoint.h"

namespace baton::net {

// Keys of its own: those of the link itself may be for what goes beside it.
MessageStream::MessageStream(const Link& link, Poller& poller, const Options& options)
    : fd_(link.fd),
      poller_(poller),
      options_(options),
      sealer_(hkdf_expand(link.keys.send, "baton messages"), Protection::kEncrypt),
      opener_(hkdf_expand(link.keys.receive, "baton messages"), Protection::kEncrypt) {
  const Endpoint remote = peer_of(fd_);
  peer_ = remote.text();
  const auto silence = options.silence / std::chrono::milliseconds(1);
  tune(fd_, remote, {.congestion = "system", .user_timeout_ms = static_cast<int>(silence)});
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

void MessageStream::abandon() {
  out_.clear();
  close(absl::CancelledError("left to another process"), false);
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
  const size_t at = out_.size();
  out_.resize(at + message.size() + kSealBytes);
  message.copy(out_.data() + at + kSealPrefix, message.size());
  sealer_.head(out_.data() + at, message.size());
  flush();
  if (out_.size() <= options_.max_waiting) return;
  close(absl::UnavailableError(absl::StrCat(
            "the peer does not read its messages: ", out_.size() >> 10, " KiB are queued for it")),
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
  char* const here = in_.data() + taken_;
  const size_t have = in_.size() - taken_;
  std::string_view message;
  switch (opener_.head(here, have, options_.max_message, message)) {
    case Opener::Found::kMore:
      return std::nullopt;
    case Opener::Found::kHead:
      taken_ += message.size() + kSealBytes;
      return message;
    case Opener::Found::kForged:
      break;
  }
  uint32_t bytes = 0;
  std::memcpy(&bytes, here, sizeof bytes);
  garbled(bytes > options_.max_message
              ? absl::StrCat("a message of ", bytes, " bytes, and at most ", options_.max_message,
                             " are allowed")
              : std::string("a message that the peer did not send, or not at this point"));
  return std::nullopt;
}

void MessageStream::garbled(const std::string& what) {
  close(absl::UnavailableError("hostile or damaged bytes: " + what), true);
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
