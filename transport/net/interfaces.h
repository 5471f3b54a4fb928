// The interfaces of this host: which of their addresses others are told, and by which of them
// packets leave.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/net/endpoint.h"

namespace baton::net {

// The addresses at which others reach a listener, as "host:port" or "host:port,host:port": of a
// wildcard those of the interfaces that are up, likely ones first, one of each interface before the
// second of any, up to eight. Link-local addresses have no scope: that is the caller's to say.
std::string advertised(int listener);

// The same, where the user has said by which addresses others reach it: "host" or "host:port", with
// commas between; "": what BATON_ADVERTISE says, unless only this machine reaches the listener.
// Names are looked up, which may block as long as DNS does. A host alone has the listener's port;
// `own_port`: so has one with another port, which is another listener's. Up to eight addresses
// (InvalidArgument); NotFound for a name that nothing is known of.
absl::StatusOr<std::string> advertised_as(const std::string& told, int listener,
                                          bool own_port = false);

// The endpoints to try for a peer's address `at`: itself, except for a link-local IPv6 address,
// which needs an interface: then one for each interface of this host that has such an address, or
// only the interface of `called` if the addresses are equal.
std::vector<Endpoint> on_interfaces(const Endpoint& at, const Endpoint* called);

// The address of this host from which packets to `to` leave; none: there is no way there.
std::optional<Endpoint> route_to(const Endpoint& to);

// All addresses of this host, each with the name of its interface.
std::vector<std::pair<std::string, Endpoint>> own_addresses();

}  // namespace baton::net
