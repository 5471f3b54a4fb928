// Which bytes a field of a layout takes: its extent, and whether two fields share a byte.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvtransfer/kv_layout.h"

namespace baton::kvtransfer {

// One dimension of a field.
struct KvStep {
  const char* name = "";
  uint64_t count = 1;
  uint64_t stride = 0;
};

// The dimensions of a field, largest stride first; those of one step come last, as {1, 0}.
struct KvSteps {
  std::array<KvStep, 5> steps;
  uint64_t element_bytes = 0;
};
KvSteps steps_of(const KvGroup& group, const KvField& field);

// From a place to the last byte that is used behind it. Saturates.
uint64_t extent_of(const KvSteps& steps);

// Whether a field that begins `distance` bytes behind the other has a byte in common with it. Exact
// where the outer dimensions are the same; below them, a field counts as solid. Both have passed
// the check that no field overlaps itself.
bool shares_bytes(const KvSteps& first, const KvSteps& second, uint64_t distance);

// No two fields, of any layers, have a byte in common. `addresses`: where each buffer of the layout
// begins, so that two may be of the same memory; empty: all are apart. Groups may share memory:
// they hand out its blocks together. InvalidArgument names both; or so many lie interleaved that to
// look at all would take long, which it must not with a layout that a peer has sent.
absl::Status check_overlaps(const KvLayout& layout, absl::Span<const uint64_t> addresses);

// Sizes that stick at the largest number instead of wrapping: for numbers that a peer chose.

inline constexpr uint64_t kTooMuch = std::numeric_limits<uint64_t>::max();

inline uint64_t saturating_add(uint64_t a, uint64_t b) {
  uint64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? kTooMuch : sum;
}

inline uint64_t saturating_mul(uint64_t a, uint64_t b) {
  uint64_t product;
  return __builtin_mul_overflow(a, b, &product) ? kTooMuch : product;
}

}  // namespace baton::kvtransfer
