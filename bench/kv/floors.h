// Floors and baselines: what else could move the same bytes, measured beside Baton.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "bench/kv/kv_bw.h"
#include "bench/kv/kv_session.h"
#include "bench/report/report.h"

namespace baton::bench {

// Something that moves the bytes of one transfer, again and again.
struct Floor {
  Reference reference;  // its name; gb_per_s is not set
  // Moves them `count` times; GB/s. Empty: there is no such floor.
  std::function<absl::StatusOr<double>(size_t count)> run;
};

// memcpy from the session's own memory to a second pool of the same kind, piece by piece in the
// order of the transfer. The session must be prepared, and must outlive it.
absl::StatusOr<Floor> memcpy_floor(KvSession& session);

// The same number of bytes on the session's device, in one copy: what lists of pages lose against
// none at all. The session must be prepared, and must outlive it.
absl::StatusOr<Floor> device_floor(KvSession& session, int device);

// Plain blocking sockets over loopback, as many and with the same congestion control as the route.
absl::StatusOr<Floor> sockets_floor(const KvBwOptions& options, size_t bytes, Cores cores,
                                    const std::string& route);

// UCX over TCP on loopback: ucx_perftest's `ucp_get` (read) or `ucp_put_bw` (write) with messages
// of `page_bytes`, the best of several windows. NotFound where it is not installed.
absl::StatusOr<Reference> ucx_baseline(Op op, size_t page_bytes, Cores cores);

}  // namespace baton::bench
