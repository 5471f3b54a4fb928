// The way of KV that is requantised between two agents: rows are converted on this agent's side,
// into or out of staging memory, and bytes move between that and the other agent. A transfer is cut
// into chunks of which each fits a slot of staging memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_plan.h"
#include "kvtransfer/kv_requantise.h"
#include "transport/transfer.h"

namespace baton::kvtransfer {

// Some layers of some tokens of one part.
struct RequantiseChunk {
  uint32_t part = 0;  // of RequantiseRoute::parts()
  KvTokens tokens;    // whole units
  KvTokens layers;    // indices into KvPart::layers
};

// A value; const calls may come from any thread.
class RequantiseRoute {
 public:
  // Op::kWrite: the source is this agent's. What KvRequantisePlan::make() says, and
  // ResourceExhausted where a slot is too small for a unit of one layer.
  static absl::StatusOr<RequantiseRoute> make(Op op, const KvLayout& source, const KvLayout& target,
                                              const KvShare& share, uint64_t slot_bytes);

  // Between the two caches.
  const KvRequantisePlan& whole() const { return whole_; }
  // Between staging memory and the other agent's cache.
  const KvPlan& wire() const { return wire_; }
  Op op() const { return op_; }

  // Those of whole() that have heads to move.
  struct Part {
    size_t whole = 0;  // its number in each of the three plans
    size_t convert = 0;
    size_t wire = 0;
    uint64_t unit = 0;          // tokens
    uint64_t unit_bytes = 0;    // of one unit of one layer, in staging memory
    uint64_t base = 0;          // of layer 0 in the staging layout
    uint64_t layer_stride = 0;  // likewise
    uint64_t slot_units = 0;    // that fit a slot
  };
  absl::Span<const Part> parts() const { return parts_; }

  // `tokens` and `layers` of a part, some of each, in chunks that fit a slot, appended to `out`.
  void cut(uint32_t part, KvTokens tokens, KvTokens layers,
           std::vector<RequantiseChunk>& out) const;
  uint64_t bytes(const RequantiseChunk& chunk) const;  // that travel

  // Converts a chunk between this agent's cache, whose buffers are at `local`, and a slot.
  absl::Status convert(const RequantiseChunk& chunk, const KvPages& local_pages,
                       absl::Span<std::byte* const> local, std::byte* slot) const;
  // For conversion elsewhere: what convert() would do, in place. Nothing there is touched.
  absl::Status for_each_box(const RequantiseChunk& chunk, const KvPages& local_pages,
                            absl::Span<std::byte* const> local, std::byte* slot,
                            absl::FunctionRef<void(const KvRowBox&)> sink) const;
  // The moves between a slot and the other agent's cache. In the side that is staging memory,
  // offsets count from the slot's beginning.
  absl::Status for_each_move(const RequantiseChunk& chunk, const KvPages& remote_pages,
                             absl::FunctionRef<absl::Status(const KvMove&)> sink) const;

 private:
  uint64_t units(const RequantiseChunk& chunk) const;
  // What is added to an offset in the staging layout to have it in a slot, for one of the layers.
  uint64_t shift(const RequantiseChunk& chunk, uint64_t layer) const;
  KvPages slot_pages(const RequantiseChunk& chunk) const;
  // Calls `one`, which has the arguments of convert_.run(), for each layer of a chunk.
  template <typename One>
  absl::Status for_each_layer(const RequantiseChunk& chunk, const KvPages& local_pages,
                              absl::Span<std::byte* const> local, std::byte* slot,
                              const One& one) const;

  Op op_ = Op::kWrite;
  KvRequantisePlan whole_;
  KvRequantisePlan convert_;
  KvPlan wire_;
  std::vector<Part> parts_;
  std::vector<uint32_t> pages_;  // 0, 1, ...: the units of a slot
};

}  // namespace baton::kvtransfer
