// Floors by plain code, without Baton: blocking sockets for tcp, one copy for all_reduce.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::bench {

struct PlainSocketsOptions {
  int sockets = 2;
  std::string congestion = "cubic";  // a name the kernel knows; "": the system's default
  size_t bytes = 256 << 20;          // moved in each round, split evenly over the sockets
  int rounds = 5;                    // after one that warms up
  size_t buffer_bytes = 4 << 20;     // SO_SNDBUF and SO_RCVBUF
  int sender_cpu = -1;               // the sending process is pinned there; -1: it is not
};

// Sends `bytes` from one buffer to another over loopback: one sender in a process of its own, one
// receiver, blocking calls, one acknowledging byte at the end of each round. Blocks for as long as
// that takes. The median of the rounds in GB/s, 10^9 bytes each.
absl::StatusOr<double> plain_sockets(const PlainSocketsOptions& options);

// The floor for all_reduce of two ranks on one machine: a loop that adds straight from the peer's
// memory and copies the other half, with a flag between them and nothing else.

// Microseconds of each of `iterations` sums of f32 vectors of `bytes`, by two pinned threads; the
// mean of both. Unavailable where there are not two cores.
absl::StatusOr<std::vector<double>> one_copy_loop(size_t bytes, int iterations, int warmup);

}  // namespace baton::bench
