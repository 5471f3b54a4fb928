// What one rank owns of the state of training: weights and moments of its pieces.
//
// The same thing goes into a checkpoint file and into a peer's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/train/data_parallel/buckets.h"

namespace baton::engine::train {

struct ShardState {
  int64_t steps = 0;  // done; the next step has this number
  std::vector<FlatRange> pieces;
  AlignedArray<float> values;  // [3][owned()]: weights, first moments, second moments

  size_t owned() const {
    size_t sum = 0;
    for (const FlatRange& piece : pieces) sum += piece.size();
    return sum;
  }
  float* weights() { return values.data(); }
  float* first_moments() { return values.data() + owned(); }
  float* second_moments() { return values.data() + 2 * owned(); }
  const float* weights() const { return values.data(); }
  const float* first_moments() const { return values.data() + owned(); }
  const float* second_moments() const { return values.data() + 2 * owned(); }
};

}  // namespace baton::engine::train
