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

}  // namespace baton::collectives::reduce
