// TCP sockets of the rendezvous: addresses, listening, connecting.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::collectives {

// A descriptor that is closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  bool loopback() const;
  std::string text() const;  // "10.0.0.1:4711"
};

// Splits "host:port" or "[v6]:port". InvalidArgument shows a good one.
absl::StatusOr<std::pair<std::string, uint16_t>> split_address(const std::string& text);

// May block for as long as DNS takes.
absl::StatusOr<std::vector<SocketAddress>> resolve(const std::string& host, uint16_t port);

// Non-blocking. `host`: "" for loopback, "*" for every interface. Port 0: any free one.
absl::StatusOr<Descriptor> listen_at(const std::string& host, uint16_t port);
// Where others reach a listener, as "host:port".
std::string reachable_address(int listener);

// A non-blocking socket on its way to `to`.
absl::StatusOr<Descriptor> start_connect(const SocketAddress& to);

// No delay, and a dead peer is found out within a minute.
void set_up(int fd);

}  // namespace baton::collectives
