// A port for a server that is not there yet, or comes back to it.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <random>

#include "transport/base/unique_fd.h"

namespace baton {

// One on which nobody listens, below those that the kernel gives to others meanwhile.
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
