// The ways to a peer: its addresses that are reached by different NICs of this host. The sockets of
// a session are spread over them.
//
// A host with several NICs names an address of each. The kernel's table of routes says by which of
// ours packets to such an address leave, so no user need say which network is which. Of the
// addresses behind one of our NICs one is enough. Left out are
//   - addresses that this host has too, as those of bridges: who calls them reaches himself;
//   - NICs half as fast as the fastest or slower (a network for management beside the fabric), and
//     where any NIC says how fast it is, those that do not (tunnels).
// What is left out is still called where none of the ways answers.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/net/endpoint.h"

namespace baton::tcp {

struct Paths {
  std::vector<net::Endpoint> ways;  // one at least
  bool unrouted = false;            // to another address of the peer there is no way at present
};

// `endpoints`: all that may be the peer's. `met`: the one of them where it was met; this is taken
// before others behind the same NIC, and is the only way where no NIC leads to any.
Paths paths_to(const std::vector<net::Endpoint>& endpoints, const net::Endpoint& met);

// Selects NICs by speed in Mb/s; 0: the speed is not known.
std::vector<bool> fast_enough(const std::vector<int64_t>& speeds);

}  // namespace baton::tcp
