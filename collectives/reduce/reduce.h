// Element-wise reductions, vectorised (Highway) for whatever the CPU has.
//
// Floats of 8 and 16 bits are widened to f32, combined and rounded to nearest even once per call.
// Integers wrap around. min and max of floats give NaN where either side is NaN. Results do not
// depend on the instruction set, the alignment or how a range is cut. Types and operations fit
// together as combines() says.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "collectives/types.h"

namespace baton::collectives::reduce {

// target[i] = a[i] (+) b[i] for `count` elements. target may be a or b; no other overlap. Pointers
// are aligned to the element. `divide_by` > 1 divides the result by it (kAvg at its last step;
// kAvg otherwise combines like kSum, and so does kPreMulSum, of which multiply() makes the inputs).
void reduce(DataType type, ReduceOp op, void* target, const void* a, const void* b, size_t count,
            uint32_t divide_by = 1);

// target[i] = ((sources[0][i] (+) sources[1][i]) (+) sources[2][i]) ... in this order. Small
// floats stay in f32 from the first to the last and are rounded once. target may be one of the
// sources. At least one source.
void fold(DataType type, ReduceOp op, void* target, absl::Span<const void* const> sources,
          size_t count, uint32_t divide_by = 1);

// target[i] = source[i] * factor, one element: what a rank contributes to kPreMulSum. target may be
// source.
void multiply(DataType type, void* target, const void* source, const void* factor, size_t count);

// Weighted sums of rows, and rows as 8-bit floats with scales, vectorised (Highway) for whatever
// the CPU has.

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
