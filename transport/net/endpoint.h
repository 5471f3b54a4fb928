// Addresses and sockets: "host:port" texts, listening, starting to connect, per-socket options.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::net {

// A socket address, IPv4 or IPv6.
struct Endpoint {
  sockaddr_storage storage{};
  socklen_t size = 0;

  std::string text() const;  // "10.0.0.1:4000", "[fe80::1%eth0]:4000"
  bool loopback() const;
  bool link_local() const;
  bool same_host(const Endpoint& other) const;  // whatever the ports
  uint16_t port() const;
  // The interface of a link-local IPv6 address, by its number on this host; 0: not given, as in
  // addresses from a peer, whose interface names mean nothing here.
  uint32_t scope() const;
  Endpoint with_scope(uint32_t scope) const;
  Endpoint at_port_of(const Endpoint& other) const;
  bool local_network() const;  // loopback, private, link-local: a fabric rather than the internet
};

// The options of every tcp socket of a worker.
struct SocketOptions {
  std::string congestion = "auto";  // "auto", "system" or a name the kernel knows
  size_t buffer_bytes = 4 << 20;    // SO_SNDBUF and SO_RCVBUF; 0: the kernel decides
  int user_timeout_ms = 10000;      // unacknowledged that long: the peer is dead
};

// Splits "host:port", "[v6]:port". InvalidArgument says what a good one looks like.
absl::StatusOr<std::pair<std::string, uint16_t>> split_host_port(std::string_view text);

// "a:4000,b" without ports: "a,b".
std::string hosts_of(std::string_view host_ports);

// Whether a host, as split_host_port() gives it, is this machine's loopback interface; "" is, as it
// is to listen_on().
bool loopback_host(std::string_view host);

// The endpoints behind "host:port". Literal addresses cost nothing; a name asks the resolver, which
// may block for as long as DNS takes.
absl::StatusOr<std::vector<Endpoint>> resolve(std::string_view host_port);
// The same as text, for literal().
absl::StatusOr<std::string> look_up(std::string_view host_port);
// The endpoints behind one or more literal addresses, "10.0.0.1:4000,[::1]:4000". Never blocks: a
// name is InvalidArgument.
absl::StatusOr<std::vector<Endpoint>> literal(std::string_view host_ports);

// A non-blocking listener. `host` "" is loopback; "*" every interface by IPv4 and IPv6, or the one
// of them that this host has; "0.0.0.0" every interface by IPv4 alone; else an address of this
// host, or a name, of whose addresses the first that can be listened on is taken. Port 0 takes any.
// Each message says what to pass instead. InvalidArgument: no host, or no address of this one;
// NotFound: a name that nothing is known of; AlreadyExists: the port is in use; PermissionDenied:
// not for this user. These four are what the caller asked for; Unavailable is the system's.
absl::StatusOr<int> listen_on(const std::string& host, uint16_t port, const SocketOptions& options);

// A non-blocking socket on its way to `to`. `segment`: the most payload that a packet has in either
// direction; 0: what the MTU of the interfaces allows.
absl::StatusOr<int> start_connect(const Endpoint& to, const SocketOptions& options,
                                  int segment = 0);
// The payload of the largest packets that a connection sends.
size_t largest_segment(int fd);

// About so much lies in a socket that the kernel has not begun to send: what is said next waits no
// longer than for that, and for what is on its way.
inline constexpr size_t kMostUnsent = 512 << 10;

// Options for an established connection: congestion control, no delay, keepalive, user timeout.
// Returns the congestion control in force.
std::string tune(int fd, const Endpoint& peer, const SocketOptions& options);

Endpoint peer_of(int fd);
Endpoint local_of(int fd);

// The status for a connect() that failed with `error`. kNotFound: the host itself reports that no
// process listens there. kUnavailable: anything else, also a firewall's or router's ICMP message,
// which gives the same ECONNREFUSED.
absl::Status why_not_connected(int fd, int error);

// For how long nothing has come from the peer, not even an acknowledgement.
std::chrono::milliseconds silent_for(int fd);
// The peer's host has all that was sent; whether the peer has looked at it is another matter.
bool all_acknowledged(int fd);
// Bytes acknowledged by the peer plus bytes received from it: grows while anything moves.
uint64_t bytes_moved(int fd);

}  // namespace baton::net
