// Requests for collective calls, and what is said of arguments that make no sense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/schedules/schedule.h"

namespace baton::collectives::internal {

// One block of elements per rank.
struct Blocks {
  absl::Span<const size_t> counts;
  absl::Span<const size_t> offsets;
};

// A collective call, as the caller of a communicator asks for it.
struct Request {
  Collective collective = Collective::kAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  // The caller's. Copied, they would be read in wider words than they were just written in: a
  // processor then waits until those are in its cache, behind all that is on its way to a peer.
  const CallOptions* options = nullptr;
  // An all_gather_v or a reduce_scatter_v: the blocks of its larger buffer. `count` is that of this
  // rank's.
  bool uneven = false;
  Blocks blocks = {};

  bool reduces() const { return schedules::reduces(collective); }
};

// How many elements of `in` and of `out` a rank names, from where they begin to the last one.
size_t in_elements(const Request& request, uint32_t rank, uint32_t ranks);
size_t out_elements(const Request& request, uint32_t rank, uint32_t ranks);
// To the end of the last block.
size_t extent(const Blocks& blocks);

// InvalidArgument: "all_reduce: why".
absl::Status refuse(Collective collective, std::string_view why);

// A blocking call could not tell how it ended.
absl::Status check_waited_for(Collective collective, const CallOptions& options);

// Refuses a null or misaligned pointer to `count` elements of `element` bytes; none: anything goes.
absl::Status check_pointer(Collective collective, const char* name, const void* pointer,
                           size_t count, size_t element);

// Checks `request` at `rank` of `ranks`, and finds out whether it is in place. `extents`: as
// in_elements() and out_elements(). `known`: an equal request with other memory has passed before,
// and `extents` belong to it.
struct Extents {
  size_t in = 0, out = 0;
};
absl::Status check_request(const Request& request, uint32_t rank, uint32_t ranks, bool& in_place,
                           Extents& extents, bool known = false);

// The same for a call between `rank` and `other`, and for one with counts and offsets of each rank.
absl::Status check_point_to_point(bool sends, const void* data, size_t count, DataType type,
                                  int other, uint32_t rank, uint32_t ranks);

absl::Status check_all_to_all_v(const void* in, const Blocks& send, const void* out,
                                const Blocks& receive, DataType type, uint32_t rank,
                                uint32_t ranks);

}  // namespace baton::collectives::internal
