// Decides which caller is dropped when too many have not authenticated yet.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/net/endpoint.h"

namespace baton::net {

struct Caller {
  const Endpoint* from = nullptr;
  bool names_our_key = false;  // Handshake::names_our_key()
};

// `callers`: the oldest first; at least one. The one to drop is from the host with the most
// callers: a host that floods pushes out its own calls, not those of others. Of that host's calls,
// the oldest that has not named a key of ours goes first, because real peers may share a host with
// the flooder.
size_t caller_to_drop(const std::vector<Caller>& callers);

}  // namespace baton::net
