// Checksums of what a plan moves, which both ends can take: prefill of its cache while a block is
// its own, decode of what has arrived. The two make this of the same two layouts; the numbers are
// equal then, however differently the two lay out their blocks.
//
//   auto sums = KvChecksums::make(prefill_layout, decode_layout, share);
//   sums->add(Side::kSource, prefill_addresses, {0, 96}, {0, pages}, 0, out);   // at prefill
//   sums->add(Side::kTarget, decode_addresses, {0, 96}, {0, pages}, 0, out);    // at decode
//
// A piece is unit() tokens of a layer: the largest number that divides both block sizes. Its
// checksum is the CRC-32 (zlib's) of all of its bytes that move, in the order in which they lie in
// the target. So it is the CRC-32 of a block where whole blocks move that are alike at both ends.
// It finds what chance does to bytes, not malice.
//
// A value; const calls may come from any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"

namespace baton::kvtransfer {

class KvChecksums {
 public:
  enum class Side : uint8_t { kSource, kTarget };

  // What KvPlan::make() says. InvalidArgument: a layout of several groups. ResourceExhausted: more
  // than kMaxRuns runs in a piece.
  static absl::StatusOr<KvChecksums> make(const KvLayout& source, const KvLayout& target,
                                          const KvShare& share = {});

  const KvPlan& plan() const { return plan_; }
  // Tokens of a piece; 0: nothing moves.
  uint32_t unit() const;
  // Bytes of a piece that is one run at both ends; 0: it is in several.
  uint64_t run_bytes() const;

  // Appends the checksums of all pieces of `tokens`, rounded outwards, of a layer (the model's
  // number), as they lie in one side's cache, whose buffers are at these addresses of this process.
  // InvalidArgument: pages that do not hold the tokens, or are not in the cache; a buffer of a
  // device; a layer that does not move.
  absl::Status add(Side side, absl::Span<const uint64_t> addresses, KvTokens tokens,
                   const KvPages& pages, uint32_t layer, std::vector<uint32_t>& out) const;

  static constexpr size_t kMaxRuns = 1 << 20;  // of a piece

 private:
  // A run of a piece at both ends, counted from where its box begins in that unit.
  struct Run {
    uint64_t source = 0;
    uint64_t target = 0;
    uint32_t box = 0;
  };

  KvPlan plan_;
  std::vector<Run> runs_;
};

}  // namespace baton::kvtransfer
