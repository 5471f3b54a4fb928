// Sums of a row, sixteen side by side and then added in order: what the CPU's vectors do. A row is
// read by many threads, 16 bytes each, and laid into shared memory; there sixteen threads add it.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kRowLanes = 16;

// `sum`, to which step() adds `count` elements, one in sixteen: those of one lane. They are read
// ahead, for only the sum itself waits for the one before.
template <class Block, class Step>
BATON_DEVICE float add_lane(Block& block, const float* lane, uint32_t count, const Step& step,
                            float sum = 0) {
  constexpr uint32_t kAhead = 16;
  const auto at = [&](uint32_t i) { return block.get(lane + i * kRowLanes); };
  uint32_t i = 0;
  if (count >= kAhead) {
    float next[kAhead];
    BATON_UNROLL for (uint32_t j = 0; j < kAhead; ++j) next[j] = at(j);
    BATON_NO_UNROLL
    for (i = kAhead; i + kAhead <= count; i += kAhead) {
      BATON_UNROLL for (uint32_t j = 0; j < kAhead; ++j) {
        sum = step(sum, next[j]);
        next[j] = at(i + j);
      }
    }
    BATON_UNROLL for (uint32_t j = 0; j < kAhead; ++j) sum = step(sum, next[j]);
  }
  BATON_NO_UNROLL
  for (; i < count; ++i) sum = step(sum, at(i));
  return sum;
}

template <class Block>
BATON_DEVICE float sum_of_lanes(Block& block, const float* lanes) {
  float sum = 0;
  BATON_UNROLL for (uint32_t lane = 0; lane < kRowLanes; ++lane) {
    sum = sum + block.get(lanes + lane);
  }
  return sum;
}
template <class Block>
BATON_DEVICE float largest_of_lanes(Block& block, const float* lanes) {
  float most = block.get(lanes);
  BATON_UNROLL for (uint32_t lane = 1; lane < kRowLanes; ++lane) {
    most = larger(most, block.get(lanes + lane));
  }
  return most;
}

// What a thread of 256 holds of kHeldRow elements that it reads ahead: kHeld times 16 bytes.
inline constexpr uint32_t kHeld = kHeldRow / 256 / 4;
struct Held {
  Vector16 of[kHeld];
};

BATON_DEVICE bool aligned_16(const void* at) { return reinterpret_cast<uint64_t>(at) % 16 == 0; }

// Four floats, aligned to 16 bytes.
template <class Block>
BATON_DEVICE Vector16 load_four(Block& block, const float* from) {
  return block.load(reinterpret_cast<const Vector16*>(from));
}
template <class Block>
BATON_DEVICE void store_four(Block& block, float* to, const Vector16& four) {
  block.store(reinterpret_cast<Vector16*>(to), four);
}

}  // namespace baton::gpudirect::kernels
