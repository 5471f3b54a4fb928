// A flat fp32 array that peers can reach without a copy; plain memory where there is one rank, or a
// device's.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "engine/kernels/aligned.h"

namespace baton::engine::train {

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
