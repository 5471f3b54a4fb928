// Weighted sums of rows, and rows as 8-bit floats with scales, vectorised (Highway) for whatever
// the CPU has.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "collectives/types.h"

namespace baton::collectives::reduce {

// target[i] = rows[0][i] * weights[0] + rows[1][i] * weights[1] + ... in this order, in f32, each
// product after the first added by a fused multiply-add (by a multiplication and an addition where
// the CPU has none), and rounded to the type once; zeros without rows. f32, f16 or bf16. target
// overlaps no row.
void weighted_sum(DataType type, void* target, absl::Span<const void* const> rows,
                  absl::Span<const float> weights, size_t count);

// Elements that share a scale.
inline constexpr size_t kScaledBlock = 128;
constexpr size_t scales_of(size_t count) { return (count + kScaledBlock - 1) / kScaledBlock; }

// A block's scale is its largest magnitude over 448, 1 where that is 0 or too small for it; its
// elements are divided by that, as products with 1 / scale, and rounded to e4m3. A block with NaN
// or an infinity becomes NaN throughout. `type`: of the row, as above.
void to_e4m3(DataType type, const void* row, size_t count, uint8_t* target, float* scales);
// target[i] = row[i] * scales[i / 128].
void from_e4m3(const uint8_t* row, const float* scales, size_t count, float* target);

}  // namespace baton::collectives::reduce
