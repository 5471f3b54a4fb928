// Rows of bf16 or fp32 to fp8 e4m3 with scales, by vectors: what KvRequantisePlan::run() does with
// rows that lie at equal distances. The definition is kv_requantise.h's, to the bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

namespace baton::kvtransfer {

// The scale of elements of which this is the largest magnitude. At least the smallest normal
// number: what lies below has too few digits to be divided by.
inline float scale_for(float largest) {
  return largest == 0 ? 1 : std::max(largest / 448.0f, std::numeric_limits<float>::min());
}

// Distances are in bytes; no address needs alignment.
struct Fp8Rows {
  const std::byte* from;
  std::byte* to;
  std::byte* scales;
  size_t rows;
  size_t from_step, to_step, scales_step;          // from a row to the next
  size_t from_element, to_element, scale_element;  // from an element of a row to the next
  size_t width;                                    // elements of a row
  size_t scales_of_row;                            // divides the width
  bool is_fp32;                                    // or bf16
};

// `from` must not overlap what is written. By the best instruction set that this machine has.
void rows_to_fp8(const Fp8Rows& rows);

}  // namespace baton::kvtransfer
