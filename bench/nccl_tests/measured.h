// The operations that nccl-tests' commands measure: the communicator's collectives, and one that is
// composed of sends and receives.
#pragma once

#include <string_view>

#include "collectives/types.h"

namespace baton::bench {

// The first are collectives by the same number.
enum class Measured : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kAllToAll,
  kBarrier,
  kSendReceive,
  kGather,     // the root receives a part from each rank
  kScatter,    // the root sends a part to each rank
  kHypercube,  // composed: an all_gather in log2(ranks) steps, each with the rank across one more
               // dimension
};
static_assert(static_cast<int>(Measured::kScatter) == static_cast<int>(Collective::kScatter));

constexpr bool is_composed(Measured what) { return what == Measured::kHypercube; }

// What the communicator is asked for; of what is composed: sends and receives.
constexpr Collective collective_of(Measured what) {
  return is_composed(what) ? Collective::kSendReceive : static_cast<Collective>(what);
}

inline std::string_view name_of(Measured what) {
  return is_composed(what) ? "hypercube" : baton::name_of(collective_of(what));
}

// Where the parts of all ranks lie one behind the other: in a rank's input, and in its output.
constexpr bool wide_input(Measured what) {
  return what == Measured::kReduceScatter || what == Measured::kAllToAll ||
         what == Measured::kScatter;
}
constexpr bool wide_output(Measured what) {
  return what == Measured::kAllGather || what == Measured::kAllToAll || what == Measured::kGather ||
         what == Measured::kHypercube;
}

}  // namespace baton::bench
