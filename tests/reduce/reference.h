// Plain loops that say what collectives/reduce/reduce.h must do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "collectives/reduce/reduce.h"

namespace baton::collectives::reduce::reference {

void reduce(DataType type, ReduceOp op, void* target, const void* a, const void* b, size_t count,
            uint32_t divide_by = 1);
void fold(DataType type, ReduceOp op, void* target, absl::Span<const void* const> sources,
          size_t count, uint32_t divide_by = 1);

// Floats of 8 and 16 bits, by arithmetic.

// A float of 8 or 16 bits: a sign, an exponent and `kFraction` bits of fraction. `kLargest` is the
// magnitude of the largest number, which what is above becomes unless it is infinite.
template <class Bits, int kFraction, int kLargest, int kInfinity, int kNaN>
struct SmallFloat {
  static constexpr int kSign = 1 << (8 * sizeof(Bits) - 1);
  static constexpr int kExponent = 8 * sizeof(Bits) - 1 - kFraction;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  Bits bits = 0;

  float widen() const {
    const int code = bits & (kSign - 1);
    const int exponent = code >> kFraction, fraction = code & ((1 << kFraction) - 1);
    float magnitude = 0;
    if (code > kInfinity || code == kNaN) {
      magnitude = std::numeric_limits<float>::quiet_NaN();
    } else if (code == kInfinity) {
      magnitude = std::numeric_limits<float>::infinity();
    } else {
      const int significand = exponent == 0 ? fraction : fraction + (1 << kFraction);
      magnitude = std::ldexp(static_cast<float>(significand),
                             (exponent == 0 ? 1 : exponent) - kBias - kFraction);
    }
    return (bits & kSign) != 0 ? -magnitude : magnitude;
  }

  static SmallFloat round(float value) {
    const int sign = std::signbit(value) ? kSign : 0;
    const auto made = [sign](int magnitude) {
      return SmallFloat{static_cast<Bits>(sign | magnitude)};
    };
    if (std::isnan(value)) return made(kNaN);
    if (std::isinf(value)) return made(kInfinity);
    if (value == 0) return made(0);
    // The value in units of the last place, which the smallest normal shares with denormals.
    const int exponent = std::max(std::ilogb(value), 1 - kBias);
    const double units =
        std::nearbyint(std::ldexp(std::fabs(static_cast<double>(value)), kFraction - exponent));
    // Rounding up to the next power of two carries into the exponent.
    const int magnitude = (exponent + kBias - 1) * (1 << kFraction) + static_cast<int>(units);
    return made(std::min<int>(magnitude, kLargest));
  }
};
using F16 = SmallFloat<uint16_t, 10, 0x7C00, 0x7C00, 0x7E00>;
using BF16 = SmallFloat<uint16_t, 7, 0x7F80, 0x7F80, 0x7FC0>;
using E4M3 = SmallFloat<uint8_t, 3, 0x7E, 0x7F, 0x7F>;
using E5M2 = SmallFloat<uint8_t, 2, 0x7B, 0x7C, 0x7E>;

}  // namespace baton::collectives::reduce::reference
