// Matrix products by the vectors' own unit for bf16 (vdpbf16ps of AVX-512), where there is one.
//
// vdpbf16ps adds to each lane of fp32 the product of two upper halves, then that of the lower ones,
// with a rounding behind each; numbers below the smallest normal one are zero, on their way in and
// out. Were the halves k and k + 1, as for tiles, two chains would become one. So the upper half is
// k and the lower k + 2: then one sum takes the even k in their order and another the odd, which
// are the chains of engine/kernels/bf16_gemm.h, at twice the rate of fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/kernels/amx.h"

namespace baton::engine {

// True if the processor has the instruction and it adds in the order above; the first call tests
// it. Any thread may call.
bool dots_usable();
// Why it may not be used, for people; empty if it may.
std::string_view why_no_dots();

// sums[16] += dots of 16 pairs of a and b.
using DotPairs = void (*)(const uint16_t* a, const uint16_t* b, float* sums);
// Tests the order of additions with some thousand sums that any other order or rounding would
// change.
bool adds_in_order(DotPairs dot);

// Pairs k with k + 2 in lines of 32 k, in place: first the pairs of even k, then those of odd k. Of
// so many tiles of 16 lines the first rows. Needs dots_usable().
void pair_for_dots(uint16_t* tiles, int count, int rows);

// As multiply_tiles(), but lines of A are paired, and `sums` is not used. Needs dots_usable().
void multiply_dots(const AmxBlock& block);

}  // namespace baton::engine
