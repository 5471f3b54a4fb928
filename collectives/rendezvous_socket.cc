// Sockets of the rendezvous.
#include "collectives/rendezvous_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace baton::collectives {
namespace {

const sockaddr* raw(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

void set_int(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

absl::StatusOr<Descriptor> listen_on(const SocketAddress& at) {
  Descriptor fd(::socket(at.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return absl::UnavailableError(absl::StrCat("socket: ", strerror(errno)));
  set_int(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (at.storage.ss_family == AF_INET6) set_int(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (::bind(fd.get(), raw(at), at.size) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  const int error = errno;
  const std::string what =
      absl::StrCat("serving the rendezvous at ", at.text(), " failed: ", strerror(error));
  if (error == EADDRINUSE) {
    return absl::AlreadyExistsError(
        absl::StrCat(what, "; another process has this port: choose another (BATON_RENDEZVOUS)"));
  }
  if (error == EADDRNOTAVAIL) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, "; no interface here has this address: pass one of the machine that rank 0 runs on"));
  }
  return absl::UnavailableError(what);
}

SocketAddress local_address(int fd) {
  SocketAddress address;
  address.size = sizeof(address.storage);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size);
  return address;
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

bool SocketAddress::loopback() const {
  if (storage.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(storage);
    return (ntohl(v4.sin_addr.s_addr) >> 24) == 127;
  }
  return storage.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr);
}

std::string SocketAddress::text() const {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  getnameinfo(raw(*this), size, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  const char* const open = storage.ss_family == AF_INET6 ? "[" : "";
  const char* const shut = storage.ss_family == AF_INET6 ? "]:" : ":";
  return absl::StrCat(open, host, shut, port);
}

absl::StatusOr<std::pair<std::string, uint16_t>> split_address(const std::string& text) {
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon != std::string::npos && colon > 0 && absl::SimpleAtoi(text.substr(colon + 1), &port) &&
      port > 0 && port <= UINT16_MAX) {
    std::string host = text.substr(0, colon);
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    if (bracketed || host.find(':') == std::string::npos) {
      return std::make_pair(host, static_cast<uint16_t>(port));
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the rendezvous \"", text,
                   "\" is not host:port; write 10.0.0.1:4711, name:4711 or [::1]:4711"));
}

absl::StatusOr<std::vector<SocketAddress>> resolve(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::NotFoundError(absl::StrCat("host ", host, " is unknown (", gai_strerror(error),
                                            "); check the name, or pass an IP address"));
  }
  std::vector<SocketAddress> found;
  for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, at->ai_addr, at->ai_addrlen);
    address.size = at->ai_addrlen;
    found.push_back(address);
  }
  freeaddrinfo(list);
  return found;
}

absl::StatusOr<Descriptor> listen_at(const std::string& host, uint16_t port) {
  if (host == "*") {
    for (const char* any : {"::", "0.0.0.0"}) {  // the first takes both kinds, where there is IPv6
      auto at = resolve(any, port);
      if (!at.ok()) continue;
      auto fd = listen_on(at->front());
      if (fd.ok() || fd.status().code() == absl::StatusCode::kAlreadyExists) return fd;
    }
    return absl::UnavailableError(
        absl::StrCat("serving the rendezvous at port ", port, " failed on every interface"));
  }
  auto at = resolve(host.empty() ? "127.0.0.1" : host, port);
  if (!at.ok()) return at.status();
  return listen_on(at->front());
}

std::string reachable_address(int listener) {
  SocketAddress at = local_address(listener);
  const bool any4 = at.storage.ss_family == AF_INET &&
                    reinterpret_cast<sockaddr_in&>(at.storage).sin_addr.s_addr == INADDR_ANY;
  const bool any6 = at.storage.ss_family == AF_INET6 &&
                    IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<sockaddr_in6&>(at.storage).sin6_addr);
  if (!any4 && !any6) return at.text();
  // The interface that leads out: connecting a datagram socket sends nothing, but picks a route.
  const auto port = ntohs(any4 ? reinterpret_cast<sockaddr_in&>(at.storage).sin_port
                               : reinterpret_cast<sockaddr_in6&>(at.storage).sin6_port);
  sockaddr_in outside{};
  outside.sin_family = AF_INET;
  outside.sin_port = htons(9);
  outside.sin_addr.s_addr = htonl(0xC0000201);  // 192.0.2.1, a documentation address
  const Descriptor probe(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&outside), sizeof(outside)) != 0) {
    return absl::StrCat("127.0.0.1:", port);
  }
  SocketAddress own = local_address(probe.get());
  reinterpret_cast<sockaddr_in&>(own.storage).sin_port = htons(port);
  return own.text();
}

absl::StatusOr<Descriptor> start_connect(const SocketAddress& to) {
  Descriptor fd(::socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) {
    return absl::UnavailableError(
        absl::StrCat("socket: ", strerror(errno), "; raise the limit on open files (ulimit -n)"));
  }
  if (::connect(fd.get(), raw(to), to.size) != 0 && errno != EINPROGRESS) {
    return absl::UnavailableError(strerror(errno));
  }
  return fd;
}

void set_up(int fd) {
  set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_int(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_int(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_int(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_int(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

}  // namespace baton::collectives
