// Choosing the caller to drop.
#include "transport/net/admission.h"

#include <algorithm>

namespace baton::net {

size_t caller_to_drop(const std::vector<const Endpoint*>& callers) {
  size_t victim = 0;
  ptrdiff_t most = 0;
  for (size_t i = 0; i < callers.size(); ++i) {
    const auto calls =
        std::count_if(callers.begin() + static_cast<ptrdiff_t>(i), callers.end(),
                      [&](const Endpoint* other) { return other->same_host(*callers[i]); });
    if (calls <= most) continue;
    most = calls;
    victim = i;
  }
  return victim;
}

}  // namespace baton::net
