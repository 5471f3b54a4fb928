// Buckets: the flat array cut into pieces that travel between ranks one by one.
//
// Gradients become final from the front of the array to its back, so buckets do too; weights are
// read from its back to its front. Every cut lies on a multiple of ranks * kNormBlock elements:
// the parts of all ranks are equal, and no block of the gradient norm is ever divided.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/kernels/aligned.h"
#include "engine/train/backward/parameters.h"

namespace baton::engine::train {

// Elements [begin, end) of the flat array.
struct FlatRange {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
  bool operator==(const FlatRange&) const = default;
};

// The gradient's norm is summed over blocks of this many elements, whichever rank owns them: the
// same sum in the same order on any number of ranks.
inline constexpr size_t kNormBlock = 1024;

// `size` rounded up so that it can be shared between the ranks. What is added stays zero.
size_t padded_size(size_t size, int ranks);

// Covers [0, padded_size). `bytes` is the size of a bucket of fp32; 0: a 24th of all, and 64 KiB
// at least. The first bucket is a quarter as large, so that the link has work early, and the
// embedding, whose gradient is final last, does not hold up what comes before it.
std::vector<FlatRange> cut_buckets(const ParameterMap& map, int ranks, size_t bytes);

// The part of a bucket that a rank owns.
FlatRange part_of(const FlatRange& bucket, int rank, int ranks);

// One rank's part of the training state: weights and moments of its pieces.
//
// The same thing goes into a checkpoint file and into a peer's memory.

struct ShardState {
  int64_t steps = 0;  // done; the next step has this number
  std::vector<FlatRange> pieces;
  AlignedArray<float> values;  // [3][owned()]: weights, first moments, second moments

  size_t owned() const {
    size_t sum = 0;
    for (const FlatRange& piece : pieces) sum += piece.size();
    return sum;
  }
};

}  // namespace baton::engine::train
