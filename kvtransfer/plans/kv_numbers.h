// Sizes that stick at the largest number instead of wrapping: for numbers that a peer chose.
#pragma once

#include <cstdint>
#include <limits>

namespace baton::kvtransfer {

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
