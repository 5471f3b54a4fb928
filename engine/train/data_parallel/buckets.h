// Buckets: the flat array cut into pieces that travel between ranks one by one.
//
// Gradients become final from the front of the array to its back, so buckets do too; weights are
// read from its back to its front. Every cut lies on a multiple of ranks * kNormBlock elements:
// the parts of all ranks are equal, and no block of the gradient norm is ever divided.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "collectives/communicator.h"
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

// A flat fp32 array that peers can reach without a copy; plain memory where there is one rank, or a
// device's.

// Zeroed. Must not outlive the communicator.
class FlatArray {
 public:
  static absl::StatusOr<FlatArray> make(Communicator* comm, size_t count) {
    FlatArray array;
    if (comm == nullptr) {
      array.plain_ = AlignedArray<float>(count);
      array.data_ = array.plain_.data();
      return array;
    }
    absl::StatusOr<CommBuffer> buffer = comm->allocate(count * sizeof(float));
    if (!buffer.ok()) return buffer.status();
    array.comm_ = comm;
    array.buffer_ = *buffer;
    array.data_ = reinterpret_cast<float*>(buffer->data);
    return array;
  }
  // Memory that `owner` keeps.
  static FlatArray adopt(float* data, std::shared_ptr<void> owner) {
    FlatArray array;
    array.owner_ = std::move(owner);
    array.data_ = data;
    return array;
  }
  FlatArray() = default;
  FlatArray(FlatArray&& other) noexcept { *this = std::move(other); }
  FlatArray& operator=(FlatArray&& other) noexcept {
    std::swap(comm_, other.comm_);
    std::swap(buffer_, other.buffer_);
    std::swap(plain_, other.plain_);
    std::swap(owner_, other.owner_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~FlatArray() {
    if (comm_ != nullptr) comm_->free(buffer_);
  }

  float* data() { return data_; }
  const float* data() const { return data_; }

 private:
  Communicator* comm_ = nullptr;
  CommBuffer buffer_;
  AlignedArray<float> plain_;
  std::shared_ptr<void> owner_;
  float* data_ = nullptr;
};

}  // namespace baton::engine::train
