// What a warp gives its tensor cores: the registers of mma.sync.m16n8k16 with bf16, twice, for 32
// k.
//
// Lane l of the warp has, of the PTX manual's matrices ("g" is l / 4, "t" is l % 4):
//   A (16 x 16)  word 0: (g, 2t) and (g, 2t + 1); word 1: row g + 8; words 2 and 3: the same, k + 8
//   B (16 x 8)   word 0: k 2t and 2t + 1 of column g; word 1: the same, k + 8
//   C (16 x 8)   values 0 and 1: (g, 2t) and (g, 2t + 1); values 2 and 3: row g + 8
#pragma once

#include <cstdint>

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kFragmentK = 32;
struct FragmentA {
  uint32_t word[8];  // of the first 16 k, then of the next
};
struct FragmentB {
  uint32_t word[4];
};
struct FragmentC {
  float value[4];
};

}  // namespace baton::gpudirect::kernels
