// Ports without a listener.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <random>

#include "tests/test.h"
#include "transport/base/unique_fd.h"
#include "transport/net/endpoint.h"

namespace baton {

// Of the loopback interface, and given to nobody else who asks for any port: a listener that was
// closed leaves its port to the next one. Who asks for it by its number may listen there.
class HeldPort {
 public:
  explicit HeldPort(uint16_t port = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    EXPECT_EQ(setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on), 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(port);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&at), sizeof at), 0) << port;
  }
  std::string address() const { return net::local_of(fd_.get()).text(); }

 private:
  base::UniqueFd fd_;
};

// A port for a server that is not there yet, or comes back to it: free, and below those that the
// kernel gives to other programs meanwhile.
inline uint16_t quiet_port() {
  std::random_device random;
  while (true) {
    const auto port = static_cast<uint16_t>(10'000 + random() % 22'000);
    const base::UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(probe.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0)
      return port;
  }
}

}  // namespace baton
