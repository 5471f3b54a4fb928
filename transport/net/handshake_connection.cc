// A connection on its way to being authenticated: connecting, the handshake, address queries.
#include "transport/net/handshake_connection.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/wire.h"
#include "transport/net/endpoint.h"

namespace baton::net {

HandshakeConnection::HandshakeConnection(int fd, Poller& poller, Handshake::Role role,
                                         const ClusterKey& key, HelloInfo self,
                                         const Handshake::Options& options, Time deadline,
                                         const std::string* answer)
    : fd_(fd),
      poller_(poller),
      role_(role),
      handshake_(role, key, std::move(self), options),
      deadline_(deadline),
      told_(answer),
      step_(role == Handshake::Role::kClient ? Step::kConnecting : Step::kShaking) {
  error_ = poller_.add(fd_, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this);
}

HandshakeConnection::~HandshakeConnection() {
  if (fd_ >= 0) ::close(take_fd());
}

int HandshakeConnection::take_fd() {
  poller_.remove(fd_);
  const int fd = fd_;
  fd_ = -1;
  return fd;
}

HandshakeConnection::FullPacket HandshakeConnection::full_packet() const {
  if (handshake_.waits_for_padding()) return FullPacket::kDue;
  return handshake_.waits_for_verdict() ? FullPacket::kSent : FullPacket::kNotAwaited;
}

bool HandshakeConnection::full_packet_is_lost() const {
  return full_packet() == FullPacket::kDue ||
         (full_packet() == FullPacket::kSent && !all_acknowledged(fd_));
}

HandshakeConnection::State HandshakeConnection::fail(absl::Status why) {
  if (error_.ok()) error_ = std::move(why);
  return State::kFailed;
}

void HandshakeConnection::fail_by_system(int code) {
  if (code == ECONNRESET || code == EPIPE) hung_up_ = true;
  fail(why_not_connected(fd_, code));
}

bool HandshakeConnection::connected() {
  if (!(ready & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return false;
  int code = 0;
  socklen_t size = sizeof(code);
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &code, &size);
  if (code == 0) return true;
  fail_by_system(code);
  return false;
}

bool HandshakeConnection::flush() {
  while (true) {
    std::string_view bytes = out_.empty() ? handshake_.to_send() : std::string_view(out_);
    if (bytes.empty()) return true;
    if (out_.empty() && handshake_.alone() > 0) bytes = bytes.substr(0, handshake_.alone());
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) fail_by_system(errno);
      return false;
    }
    if (out_.empty()) {
      handshake_.sent(static_cast<size_t>(n));
    } else {
      out_.erase(0, static_cast<size_t>(n));
    }
  }
}

bool HandshakeConnection::read(size_t want) {
  char bytes[kMaxAnswer];
  while (in_.size() < want) {
    const size_t ask = std::min(want - in_.size(), sizeof(bytes));
    const ssize_t n = ::recv(fd_, bytes, ask, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return false;
    if (n < 0) {
      fail_by_system(errno);
      return false;
    }
    if (n == 0) {
      hung_up_ = true;
      fail(absl::UnavailableError("the other side closed the connection during the handshake"));
      return false;
    }
    heard_ = true;
    in_.append(bytes, static_cast<size_t>(n));
  }
  return true;
}

HandshakeConnection::State HandshakeConnection::advance() {
  if (!error_.ok()) return State::kFailed;
  if (step_ == Step::kConnecting) {
    if (!connected()) return error_.ok() ? State::kUnderway : State::kFailed;
    if (fills_a_packet_) {
      const size_t segment = largest_segment(fd_);
      if (segment <= Handshake::kMostPadding) handshake_.pad(segment);
    }
    step_ = Step::kShaking;
  }
  ready = 0;
  State state = State::kUnderway;
  if (step_ == Step::kShaking) state = shake();
  if (step_ != Step::kShaking && error_.ok()) state = query();
  return error_.ok() ? state : State::kFailed;
}

HandshakeConnection::State HandshakeConnection::shake() {
  while (error_.ok()) {
    if (!flush()) return State::kUnderway;
    if (handshake_.done()) break;
    if (!read(handshake_.wanted())) return State::kUnderway;
    absl::Status status = handshake_.receive(in_);
    in_.clear();
    if (!status.ok()) {
      flush();  // tells the other side why
      return fail(std::move(status));
    }
  }
  if (handshake_.purpose() == Handshake::Purpose::kRail) return State::kDone;
  if (role_ == Handshake::Role::kClient) {
    step_ = Step::kLength;
  } else {
    base::put_number(out_, static_cast<uint32_t>(told_->size()));
    out_ += *told_;
    step_ = Step::kAnswering;
  }
  return State::kUnderway;
}

HandshakeConnection::State HandshakeConnection::query() {
  if (step_ == Step::kAnswering) {
    if (!flush()) return State::kUnderway;
    ::shutdown(fd_, SHUT_WR);
    step_ = Step::kLingering;
  }
  if (step_ == Step::kLingering) {  // until the client has it all and hangs up
    char byte;
    const ssize_t n = ::recv(fd_, &byte, 1, MSG_DONTWAIT);
    return n < 0 && (errno == EAGAIN || errno == EINTR) ? State::kUnderway : State::kDone;
  }
  if (step_ == Step::kLength) {
    if (!read(sizeof(length_))) return State::kUnderway;
    std::memcpy(&length_, in_.data(), sizeof(length_));
    in_.clear();
    if (length_ == 0 || length_ > kMaxAnswer) {
      return fail(absl::InvalidArgumentError(
          absl::StrCat("the worker answered with an address of ", length_, " bytes")));
    }
    step_ = Step::kAnswer;
  }
  return read(length_) ? State::kDone : State::kUnderway;
}

}  // namespace baton::net
