// Part of builds with the thread sanitizer only. Abseil is the distribution's, compiled without it:
// of the count of who shares a Status the sanitizer sees the increments, which are inline, and not
// the decrements. Two threads that share an error then race for it, as far as it knows: whoever
// lets go last deletes what another had counted up. This stands in for the library's decrement,
// where it can be seen.
#include <absl/base/config.h>
#include <absl/status/status.h>

#if defined(ABSL_LTS_RELEASE_VERSION) && \
    ABSL_LTS_RELEASE_VERSION < 20240722  // later ones have another function

namespace absl {
ABSL_NAMESPACE_BEGIN

void Status::UnrefNonInlined(uintptr_t rep) {
  status_internal::StatusRep* shared = RepToPointer(rep);
  if (shared->ref.fetch_sub(1, std::memory_order_acq_rel) == 1) delete shared;
}

ABSL_NAMESPACE_END
}  // namespace absl

#endif
