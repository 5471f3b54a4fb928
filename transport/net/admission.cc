// Choosing the caller to drop.
#include "transport/net/admission.h"

#include <algorithm>

namespace baton::net {

size_t caller_to_drop(const std::vector<Caller>& callers) {
  size_t oldest = 0;  // of the host with the most
  ptrdiff_t most = 0;
  for (size_t i = 0; i < callers.size(); ++i) {
    const auto calls =
        std::count_if(callers.begin() + static_cast<ptrdiff_t>(i), callers.end(),
                      [&](const Caller& other) { return other.from->same_host(*callers[i].from); });
    if (calls <= most) continue;
    most = calls;
    oldest = i;
  }
  for (size_t i = oldest; i < callers.size(); ++i) {
    if (!callers[i].names_our_key && callers[i].from->same_host(*callers[oldest].from)) return i;
  }
  return oldest;
}

}  // namespace baton::net
