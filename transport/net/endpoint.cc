// Socket addresses as text, listening and connecting sockets, and their options.
#include "transport/net/endpoint.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "transport/base/limits/refusals.h"

#ifndef TCP_USER_TIMEOUT
#define TCP_USER_TIMEOUT 18
#endif

namespace baton::net {
namespace {

const sockaddr_in& v4(const Endpoint& e) { return reinterpret_cast<const sockaddr_in&>(e.storage); }
const sockaddr_in6& v6(const Endpoint& e) {
  return reinterpret_cast<const sockaddr_in6&>(e.storage);
}
sockaddr* raw(Endpoint& e) { return reinterpret_cast<sockaddr*>(&e.storage); }
const sockaddr* raw(const Endpoint& e) { return reinterpret_cast<const sockaddr*>(&e.storage); }

// The IPv4 address of an endpoint in host order, also when it is mapped into IPv6; 0: none.
uint32_t ipv4_of(const Endpoint& e) {
  if (e.storage.ss_family == AF_INET) return ntohl(v4(e).sin_addr.s_addr);
  if (e.storage.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&v6(e).sin6_addr)) {
    uint32_t address;
    std::memcpy(&address, &v6(e).sin6_addr.s6_addr[12], 4);
    return ntohl(address);
  }
  return 0;
}

size_t sysctl_number(const char* path) {
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  size_t value = 0;
  if (std::fscanf(file, "%zu", &value) != 1) value = 0;
  std::fclose(file);
  return value;
}

// An explicit size ends the kernel's autotuning, so it is only set where it is granted in full.
void set_buffer(int fd, int option, int force_option, const char* limit, size_t bytes) {
  if (bytes == 0) return;
  const int value = static_cast<int>(std::min<size_t>(bytes, 1 << 30));
  if (setsockopt(fd, SOL_SOCKET, force_option, &value, sizeof(value)) == 0) return;
  if (sysctl_number(limit) >= bytes) setsockopt(fd, SOL_SOCKET, option, &value, sizeof(value));
}

// Before connect() or listen(), because the window scale is fixed there.
void set_buffers(int fd, size_t bytes) {
  set_buffer(fd, SO_SNDBUF, SO_SNDBUFFORCE, "/proc/sys/net/core/wmem_max", bytes);
  set_buffer(fd, SO_RCVBUF, SO_RCVBUFFORCE, "/proc/sys/net/core/rmem_max", bytes);
}

std::string congestion_of(int fd) {
  char name[32] = {};
  socklen_t size = sizeof(name) - 1;
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return "unknown";
  return name;
}

bool set_congestion(int fd, const std::string& name) {
  return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

void set_int(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

absl::StatusOr<std::vector<Endpoint>> lookup(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    return absl::NotFoundError(absl::StrCat("host ", host, " is unknown (", gai_strerror(error),
                                            "); check the name, or pass an IP address"));
  }
  std::vector<Endpoint> found;
  for (addrinfo* at = list; at != nullptr; at = at->ai_next) {
    Endpoint endpoint;
    std::memcpy(&endpoint.storage, at->ai_addr, at->ai_addrlen);
    endpoint.size = at->ai_addrlen;
    found.push_back(endpoint);
  }
  freeaddrinfo(list);
  return found;
}

void set_port(Endpoint& e, uint16_t port) {
  if (e.storage.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(e.storage).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(e.storage).sin6_port = htons(port);
  }
}

absl::Status why_not_listening(const Endpoint& at, int error) {
  const std::string what = absl::StrCat("listening on ", at.text(), ": ", strerror(error));
  switch (error) {
    case EADDRINUSE:
      return absl::AlreadyExistsError(absl::StrCat(
          what, "; another process has this port: choose another, or 0 for any free one"));
    case EADDRNOTAVAIL:
      return absl::InvalidArgumentError(absl::StrCat(
          what,
          "; no interface here has this address: pass one of this machine, or \"*\" for all"));
    case EAFNOSUPPORT:
      return absl::InvalidArgumentError(
          absl::StrCat(what, "; this machine has no IPv", at.storage.ss_family == AF_INET6 ? 6 : 4,
                       ": pass an address of the other family, or \"*\" for all there are"));
    case EINVAL:  // a link-local address without its interface
      return absl::InvalidArgumentError(
          absl::StrCat(what, at.link_local() ? "; say on which interface: fe80::1%eth0" : ""));
    case EACCES:
      return absl::PermissionDeniedError(
          absl::StrCat(what, "; this user may not listen there: choose a port from 1024 on"));
    default:
      return absl::UnavailableError(what);
  }
}

absl::StatusOr<int> listen_at(const Endpoint& at, const SocketOptions& options) {
  const int fd = ::socket(at.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return why_not_listening(at, errno);
  set_int(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (at.storage.ss_family == AF_INET6) set_int(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  set_buffers(fd, options.buffer_bytes);
  if (bind(fd, raw(at), at.size) == 0 && ::listen(fd, 128) == 0) return fd;
  const int error = errno;
  ::close(fd);
  return why_not_listening(at, error);
}

absl::StatusOr<int> listen_on_host(std::string_view host, uint16_t port,
                                   const SocketOptions& options) {
  if (split_host_port(host).ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("listening on \"", std::string(host),
                     "\": that is a host and a port; give the host alone, and the port by itself"));
  }
  if (host.starts_with("[") && host.ends_with("]")) host = host.substr(1, host.size() - 2);
  auto endpoints = lookup(std::string(host), port, AI_PASSIVE);
  if (!endpoints.ok()) {
    return absl::Status(
        endpoints.status().code(),
        absl::StrCat("listening on \"", std::string(host), "\": ", endpoints.status().message()));
  }
  absl::Status why;  // the first address's
  for (const Endpoint& at : *endpoints) {
    auto fd = listen_at(at, options);
    if (fd.ok()) return fd;
    why.Update(fd.status());
  }
  return why;
}

}  // namespace

std::string Endpoint::text() const {
  char host[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  const uint32_t mapped = storage.ss_family == AF_INET6 ? ipv4_of(*this) : 0;
  if (mapped != 0) {
    return absl::StrCat(mapped >> 24, ".", (mapped >> 16) & 255, ".", (mapped >> 8) & 255, ".",
                        mapped & 255, ":", ntohs(v6(*this).sin6_port));
  }
  getnameinfo(raw(*this), size, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  if (storage.ss_family == AF_INET6) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

bool Endpoint::loopback() const {
  const uint32_t ip = ipv4_of(*this);
  if (ip != 0) return (ip >> 24) == 127;
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6(*this).sin6_addr);
}

bool Endpoint::link_local() const {
  const uint32_t ip = ipv4_of(*this);
  if (ip != 0) return (ip >> 16) == 0xA9FE;
  return storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6(*this).sin6_addr);
}

bool Endpoint::same_host(const Endpoint& other) const {
  const uint32_t ip = ipv4_of(*this);
  if (ip != 0 || ipv4_of(other) != 0) return ip == ipv4_of(other);
  return storage.ss_family == other.storage.ss_family &&
         std::memcmp(&v6(*this).sin6_addr, &v6(other).sin6_addr, sizeof(in6_addr)) == 0;
}

uint16_t Endpoint::port() const {
  return ntohs(storage.ss_family == AF_INET ? v4(*this).sin_port : v6(*this).sin6_port);
}

Endpoint Endpoint::at_port_of(const Endpoint& other) const {
  Endpoint out = *this;
  set_port(out, other.port());
  return out;
}

uint32_t Endpoint::scope() const {
  return storage.ss_family == AF_INET6 ? v6(*this).sin6_scope_id : 0;
}

Endpoint Endpoint::with_scope(uint32_t scope) const {
  Endpoint out = *this;
  if (storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(out.storage).sin6_scope_id = scope;
  }
  return out;
}

bool Endpoint::local_network() const {
  if (loopback() || link_local()) return true;
  const uint32_t ip = ipv4_of(*this);
  if (ip != 0) return (ip >> 24) == 10 || (ip >> 20) == 0xAC1 || (ip >> 16) == 0xC0A8;
  return storage.ss_family == AF_INET6 && (v6(*this).sin6_addr.s6_addr[0] & 0xFE) == 0xFC;
}

absl::StatusOr<std::pair<std::string, uint16_t>> split_host_port(std::string_view text) {
  const auto bad = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", std::string(text),
                     "\" is not host:port; write 10.0.0.1:4000, name:4000 or [::1]:4000"));
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad();
  std::string_view host = text.substr(0, colon);
  uint32_t port = 0;
  if (!absl::SimpleAtoi(std::string(text.substr(colon + 1)), &port) || port == 0 || port > 65535)
    return bad();
  if (host.starts_with("[") && host.ends_with("]")) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad();
  }
  if (host.empty()) return bad();
  return std::make_pair(std::string(host), static_cast<uint16_t>(port));
}

std::string hosts_of(std::string_view host_ports) {
  return absl::StrJoin(absl::StrSplit(std::string(host_ports), ','), ",",
                       [](std::string* out, const auto& one) {
                         const auto parts = split_host_port(std::string(one));
                         out->append(parts.ok() ? parts->first : std::string(one));
                       });
}

bool loopback_host(std::string_view host) {
  return host.empty() || host == "localhost" || host == "::1" || host == "[::1]" ||
         host.starts_with("127.");
}

absl::StatusOr<std::vector<Endpoint>> resolve(std::string_view host_port) {
  auto parts = split_host_port(host_port);
  if (!parts.ok()) return parts.status();
  return lookup(parts->first, parts->second, 0);
}

absl::StatusOr<std::string> look_up(std::string_view host_port) {
  const auto found = resolve(host_port);
  if (!found.ok()) return found.status();
  return absl::StrJoin(*found, ",", [](std::string* out, const Endpoint& endpoint) {
    out->append(endpoint.text());
  });
}

absl::StatusOr<std::vector<Endpoint>> literal(std::string_view host_ports) {
  std::vector<Endpoint> found;
  absl::Status why;
  const std::string text(host_ports);
  for (const auto one : absl::StrSplit(text, ',')) {
    auto parts = split_host_port(std::string(one));
    if (!parts.ok()) {
      why.Update(parts.status());
      continue;
    }
    auto endpoints = lookup(parts->first, parts->second, AI_NUMERICHOST);
    if (endpoints.ok()) {
      found.insert(found.end(), endpoints->begin(), endpoints->end());
    } else {
      why.Update(absl::InvalidArgumentError(absl::StrCat(
          "\"", parts->first, "\" is not an IP address: a worker hands out addresses, not names")));
    }
  }
  if (found.empty()) return why;
  return found;
}

absl::StatusOr<int> listen_on(const std::string& host, uint16_t port,
                              const SocketOptions& options) {
  std::vector<std::string> hosts = {host};
  if (host.empty()) hosts = {"127.0.0.1", "::1"};
  if (host == "*") hosts = {"::", "0.0.0.0"};
  absl::StatusOr<int> out = absl::UnavailableError("nothing to listen on");
  absl::Status first;
  for (const std::string& each : hosts) {
    out = listen_on_host(each, port, options);
    if (out.ok() || absl::IsAlreadyExists(out.status()) || absl::IsPermissionDenied(out.status())) {
      return out;
    }
    first.Update(out.status());
  }
  // Where one of two address families is missing, report the first one's reason.
  return host == "*" ? out : absl::StatusOr<int>(first);
}

absl::StatusOr<int> start_connect(const Endpoint& to, const SocketOptions& options, int segment) {
  const int fd = ::socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    return absl::UnavailableError(base::refusal("socket", errno));
  }
  set_buffers(fd, options.buffer_bytes);
  if (segment > 0) set_int(fd, IPPROTO_TCP, TCP_MAXSEG, segment);
  if (::connect(fd, raw(to), to.size) != 0 && errno != EINPROGRESS) {
    absl::Status why = why_not_connected(fd, errno);
    ::close(fd);
    return why;
  }
  return fd;
}

size_t largest_segment(int fd) {
  int segment = 0;
  socklen_t size = sizeof(segment);
  getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment, &size);
  return static_cast<size_t>(std::max(segment, 0));
}

absl::Status why_not_connected(int fd, int error) {
  if (error != ECONNREFUSED) return absl::UnavailableError(strerror(error));
  tcp_info info{};
  socklen_t size = sizeof(info);
  const bool known = getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
                     size >= offsetof(tcp_info, tcpi_segs_in) + sizeof(info.tcpi_segs_in);
  // The host's own refusal is a segment of TCP.
  if (!known || info.tcpi_segs_in > 0) return absl::NotFoundError(strerror(error));
  return absl::UnavailableError(absl::StrCat(
      strerror(error),
      ": a device on the path rejected it (ICMP); does a firewall block the connection?"));
}

std::string tune(int fd, const Endpoint& peer, const SocketOptions& options) {
  set_int(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_int(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(kMostUnsent));
  set_int(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_int(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_int(fd, IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set_int(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_int(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, options.user_timeout_ms);
  if (options.congestion == "auto") {
    // bbr paces: on a fabric or on loopback that halves the speed. Elsewhere the system knows best.
    // What goes to an address of this host goes over loopback, whatever the address is.
    const bool near = peer.local_network() || peer.same_host(local_of(fd));
    if (near && congestion_of(fd) == "bbr") set_congestion(fd, "cubic");
  } else if (options.congestion != "system") {
    set_congestion(fd, options.congestion);
  }
  return congestion_of(fd);
}

Endpoint peer_of(int fd) {
  Endpoint e;
  e.size = sizeof(e.storage);
  if (getpeername(fd, raw(e), &e.size) != 0) e.size = 0;
  return e;
}

Endpoint local_of(int fd) {
  Endpoint e;
  e.size = sizeof(e.storage);
  if (getsockname(fd, raw(e), &e.size) != 0) e.size = 0;
  return e;
}

std::chrono::milliseconds silent_for(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::chrono::milliseconds(0);
  return std::chrono::milliseconds(std::min(info.tcpi_last_data_recv, info.tcpi_last_ack_recv));
}

bool all_acknowledged(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return info.tcpi_unacked == 0 && info.tcpi_notsent_bytes == 0;
}

uint64_t bytes_moved(int fd) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return info.tcpi_bytes_acked + info.tcpi_bytes_received;
}

}  // namespace baton::net
