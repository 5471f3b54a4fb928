// The passive side of `baton kv_bw`: memory that an initiator asks for, fills, reads, writes and
// has checked. It is told what to do by notifications, so that it works over any provider.
//
//   initiator -> target                        target -> initiator
//   {"do":"setup","role":R,"workload":W}       {"ok":true,"region":HEX,"backing":TEXT}
//   {"do":"fill","seed":N}                     {"ok":true}
//   {"do":"poison"}                            {"ok":true}
//   {"do":"check","seed":N}                    {"ok":true}
//   {"do":"bye"}                               (none)
//
// R is "source" or "target" of the bytes; an error comes as {"error":TEXT}.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "transport/worker.h"

namespace baton::bench {

struct KvTargetOptions {
  bool once = false;                            // return after the first initiator has left
  std::optional<int> device;                    // memory of this CUDA device
  std::function<void(const std::string&)> say;  // lines for people; may be empty
};

// Serves initiators, one at a time, on the calling thread, which drives the worker.
absl::Status serve_kv_target(Worker& worker, const KvTargetOptions& options);

}  // namespace baton::bench
