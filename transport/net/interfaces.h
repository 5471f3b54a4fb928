// The interfaces of this host: which of their addresses others are told, and by which of them
// packets leave.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/net/endpoint.h"

namespace baton::net {

// The addresses at which others reach a listener, as "host:port" or "host:port,host:port": of a
// wildcard those of the interfaces that are up, likely ones first, one of each interface before the
// second of any, up to eight.
std::string advertised(int listener);

// The address of this host from which packets to `to` leave; none: there is no way there.
std::optional<Endpoint> route_to(const Endpoint& to);

// All addresses of this host, each with the name of its interface.
std::vector<std::pair<std::string, Endpoint>> own_addresses();

}  // namespace baton::net
