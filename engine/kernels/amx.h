// Matrix products by the processor's tile unit (Intel AMX), where there is one.
//
// A tile holds 16 rows of 64 bytes. tdpbf16ps multiplies a tile of A (16 rows x 32 bf16) with a
// tile of B (16 pairs of rows x 16 columns of pairs) and adds to a tile of C (16 x 16 fp32). For
// every element it sums the even and the odd products of the 32 apart, in order and from zero, adds
// the two sums, and adds that to C; numbers below the smallest normal one are zero, on their way in
// and out. engine/kernels/bf16_gemm.h makes an arithmetic of this, which needs no tile unit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace baton::engine {

// True if this process may use AMX tiles. The first call asks the kernel, for all present and
// future threads of the process. Any thread may call.
bool amx_usable();
// Why it may not, for people; empty if it may.
std::string_view why_no_amx();

// One thread's product. Rows of A are rounded and stored as tiles, B as bf16_gemm.h packs it.
// Behind its last row A is padded to whole tiles with any values.
struct AmxBlock {
  const uint16_t* a = nullptr;  // [ceil(rows / 16)][steps][16][32], strips a_strip elements apart
  const uint16_t* b = nullptr;  // [ceil(columns / 32)][steps][2][16][16][2]
  float* c = nullptr;           // [rows][columns], row stride ldc
  // Where sums lie between pieces of k, because rows of C may be a power of two apart, and then
  // push each other out of the caches: ceil(rows / 16) * ceil(columns / 16) tiles of 256, 64-byte
  // aligned.
  float* sums = nullptr;
  // As many columns that this thread will multiply next, which come into L2 meanwhile; or none.
  // Where other calls ask for the rest, this one asks for one part of so many.
  const uint16_t* next_b = nullptr;
  int next_part = 0, next_parts = 1;
  size_t a_strip = 0;
  size_t ldc = 0;
  int rows = 0;
  int columns = 0;
  int steps = 0;  // of 32 k
  bool accumulate = false;
};

// Needs amx_usable(). Only rows x columns of C are touched.
void multiply_tiles(const AmxBlock& block);

}  // namespace baton::engine
