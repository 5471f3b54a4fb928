// Who makes room when too many callers have not proved themselves yet.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/net/endpoint.h"

namespace baton::net {

// `callers`: where each comes from, the oldest first; at least one. The one to drop: the oldest
// from the host with the most callers. A host that floods pushes out its own calls, not those of
// others.
size_t caller_to_drop(const std::vector<const Endpoint*>& callers);

}  // namespace baton::net
