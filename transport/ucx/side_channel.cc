// Moving the short messages of a side channel.
#include "transport/ucx/side_channel.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/tcp/endpoint.h"
#include "transport/wire.h"

namespace baton::ucx {

SideChannel::SideChannel(int fd, tcp::Poller& poller) : fd_(fd), poller_(poller) {
  const tcp::Endpoint remote = tcp::peer_of(fd);
  peer_ = remote.text();
  tcp::tune(fd, remote, {.congestion = "system"});
  ready = EPOLLIN;
}

absl::StatusOr<std::unique_ptr<SideChannel>> SideChannel::create(int fd, tcp::Poller& poller) {
  std::unique_ptr<SideChannel> channel(new SideChannel(fd, poller));
  absl::Status status = poller.add(fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *channel);
  if (!status.ok()) return status;
  return channel;
}

SideChannel::~SideChannel() {
  poller_.remove(fd_);
  ::close(fd_);
}

void SideChannel::say(std::string_view message) {
  put_number(out_, static_cast<uint32_t>(message.size()));
  out_.append(message);
  flush().IgnoreError();  // which hear() will find out too
}

absl::Status SideChannel::flush() {
  while (!out_.empty()) {
    const ssize_t n = ::send(fd_, out_.data(), out_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return absl::UnavailableError(strerror(errno));
    out_.erase(0, static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::Status SideChannel::take() {
  char bytes[4096];
  while (in_.size() <= sizeof(uint32_t) + kMaxMessage) {
    const ssize_t n = ::recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) return absl::UnavailableError(strerror(errno));
    if (n == 0) return absl::UnavailableError("it closed the connection");
    in_.append(bytes, static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> SideChannel::hear() {
  if (ready == 0 && in_.empty()) return std::nullopt;
  ready = 0;
  if (absl::Status status = flush(); !status.ok()) return status;
  if (absl::Status status = take(); !status.ok()) return status;
  if (in_.size() < sizeof(uint32_t)) return std::nullopt;
  const uint32_t bytes = WireReader(in_).number<uint32_t>();
  if (bytes > kMaxMessage) {
    return absl::UnavailableError("hostile or damaged bytes on the connection beside UCX");
  }
  if (in_.size() < sizeof(uint32_t) + bytes) return std::nullopt;
  std::string message = in_.substr(sizeof(uint32_t), bytes);
  in_.erase(0, sizeof(uint32_t) + bytes);
  return message;
}

}  // namespace baton::ucx
