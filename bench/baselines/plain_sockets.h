// The floor for tcp: plain blocking sockets, as many and under the same congestion control.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace baton::bench {

struct PlainSocketsOptions {
  int sockets = 2;
  std::string congestion = "cubic";  // a name the kernel knows; "": the system's default
  size_t bytes = 256 << 20;          // moved in each round, split evenly over the sockets
  int rounds = 5;                    // after one that warms up; the best counts
  size_t chunk = 1 << 20;            // of one send() or recv(), taken from the sockets in turn
  size_t buffer_bytes = 4 << 20;     // SO_SNDBUF and SO_RCVBUF; 0: the kernel decides
  bool fork_sender = true;           // the sender is a process of its own, else a thread
  int sender_cpu = -1;               // that process is pinned there; -1: it is not
};

struct PlainSocketsResult {
  double gb_per_second = 0;  // of the best round; 10^9 bytes
  double median = 0;
  std::string congestion;  // in force
};

// Sends `bytes` from one buffer to another over loopback: one sender, one receiver, blocking calls,
// one acknowledging byte at the end of each round. Blocks for as long as that takes.
absl::StatusOr<PlainSocketsResult> plain_sockets(const PlainSocketsOptions& options);

}  // namespace baton::bench
