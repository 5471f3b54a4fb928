// Requantising plans: KV of one element type into a cache of another, on the CPU.
//
// A plan (kvtransfer/kv_plan.h) moves bytes as they are. Where prefill keeps bf16 and decode wants
// fp8 with scales, prefill requantises its blocks into a cache of decode's type first, in its own
// memory, and sends that. Tensor-parallel degrees, block sizes and orders may differ here too.
//
// A row is the elements of one token and head. With a scale field of width n, each nth of a row has
// one scale: the largest finite magnitude in it / 448 (at least 2^-126), or 1 where all are zero.
// An element becomes the e4m3 value nearest to element / scale, ties to the even code; NaN and
// infinities become NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"
#include "kvtransfer/kv_plan.h"

namespace baton::kvtransfer {

// The nearest e4m3 value (OCP 8-bit floating point, revision 1.0: largest 448, no infinities),
// ties to even. Larger magnitudes become 448; infinities and NaN become NaN.
uint8_t fp8_e4m3_of(float value);
float float_of_fp8_e4m3(uint8_t code);

class KvRequantisePlan {
 public:
  // From a source whose K, V or latent are bf16 or fp32 to a target where each is fp8 e4m3 and has
  // its scales (kKeyScale, kValueScale, kLatentScale: fp32, for each token, of a width that divides
  // the row's). Layers and heads (of the source's share) that both hold are converted, as in a
  // KvPlan. FailedPrecondition, naming the difference and the remedy, for anything else.
  static absl::StatusOr<KvRequantisePlan> make(const KvLayout& source, const KvLayout& target,
                                               const KvShare& share = {});

  const KvLayout& source() const { return source_; }
  const KvLayout& target() const { return target_; }
  // KvPart::boxes are empty: rows are converted, not copied.
  absl::Span<const KvPart> parts() const { return parts_; }
  // As KvPlan::complete().
  bool complete() const { return complete_; }

  // Converts `tokens`, exactly those, of layers [layers.begin, layers.end) of a part (indices into
  // KvPart::layers). `from` and `to`: where the layouts' buffers lie in this process. Ranges and
  // pages are checked as KvPlan does. FailedPrecondition where some of that memory is not mapped.
  absl::Status run(size_t part, KvTokens tokens, const KvPages& source, const KvPages& target,
                   absl::Span<const std::byte* const> from, absl::Span<std::byte* const> to,
                   KvTokens layers = KvPlan::kAllLayers) const;

 private:
  KvLayout source_;
  KvLayout target_;
  std::vector<KvPart> parts_;
  bool complete_ = false;
};

}  // namespace baton::kvtransfer
