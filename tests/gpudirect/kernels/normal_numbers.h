// Normally distributed numbers, the same for the same seed: what kernels are tried with.
#pragma once

#include "tests/std.h"

namespace baton::gpudirect {

inline std::vector<float> normal(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> out(count);
  for (float& value : out) value = distribution(random);
  return out;
}

}  // namespace baton::gpudirect
