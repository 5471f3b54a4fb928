// A side of a handshake that a test holds in its hands: a blocking socket, and what it says.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>

#include "tests/test.h"
#include "transport/net/endpoint.h"
#include "transport/net/handshake.h"

namespace baton::net {

// A blocking connection to whatever listens there, from `source` where that is given. Connecting
// needs nothing of the other side yet.
inline int dial(const std::string& address, const char* source = nullptr) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (source != nullptr) {
    sockaddr_in from{};
    from.sin_family = AF_INET;
    EXPECT_EQ(1, inet_pton(AF_INET, source, &from.sin_addr));
    EXPECT_EQ(0, ::bind(fd, reinterpret_cast<const sockaddr*>(&from), sizeof from));
  }
  const Endpoint to = resolve(address)->front();
  EXPECT_EQ(0, ::connect(fd, reinterpret_cast<const sockaddr*>(&to.storage), to.size));
  return fd;
}

// Whether `in` has reached `want` bytes, with what has come.
inline bool take(int fd, std::string& in, size_t want) {
  char bytes[4096];
  while (in.size() < want) {
    const ssize_t n = ::recv(fd, bytes, std::min(want - in.size(), sizeof bytes), MSG_DONTWAIT);
    if (n <= 0) return false;
    in.append(bytes, static_cast<size_t>(n));
  }
  return true;
}

// Says and hears what can be said and heard now; true: the handshake is done. `in` is its own.
inline bool go_on(Handshake& handshake, int fd, std::string& in) {
  while (true) {
    const std::string_view out = handshake.to_send();
    if (!out.empty()) {
      EXPECT_EQ(::send(fd, out.data(), out.size(), MSG_NOSIGNAL), static_cast<ssize_t>(out.size()));
      handshake.sent(out.size());
    }
    if (handshake.done()) return true;
    if (handshake.wanted() == 0 || !take(fd, in, handshake.wanted())) return false;
    EXPECT_TRUE(handshake.receive(in).ok());
    in.clear();
  }
}

}  // namespace baton::net
