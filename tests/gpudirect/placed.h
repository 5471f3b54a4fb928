// Vectors for collectives, in the host's memory or in a device's.
#pragma once

#include "collectives/communicator.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/std.h"

namespace baton {

template <typename T>
class Placed {
 public:
  // Null: the host's. On a device so many bytes behind what is aligned.
  Placed(gpudirect::InstalledFake* gpu, std::vector<T> values, size_t skip = 0)
      : gpu_(values.empty() ? nullptr : gpu), skip_(skip), values_(std::move(values)) {
    if (gpu_ == nullptr) return;
    at_ = gpu_->fake().allocate(bytes() + skip + 1);
    put(values_);
  }
  ~Placed() {
    if (gpu_ != nullptr) gpu_->fake().free(at_);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  size_t size() const { return values_.size(); }
  T* data() { return gpu_ != nullptr ? gpudirect::pointer_of<T>(at_ + skip_) : values_.data(); }
  void put(const std::vector<T>& values) { std::memcpy(view(), values.data(), bytes()); }
  std::vector<T> get() {
    if (gpu_ != nullptr) std::memcpy(values_.data(), view(), bytes());
    return values_;
  }

 private:
  size_t bytes() const { return values_.size() * sizeof(T); }
  void* view() {
    if (gpu_ == nullptr) return values_.data();
    return gpu_->fake().view(at_ + skip_, bytes());
  }

  gpudirect::InstalledFake* const gpu_;
  const size_t skip_;
  std::vector<T> values_;
  gpudirect::DevicePointer at_ = 0;
};

using Bytes = Placed<std::byte>;
inline std::vector<std::byte> all_of(size_t bytes, uint8_t value) {
  return std::vector<std::byte>(bytes, std::byte{value});
}
// The sum over the ranks, in place.
inline absl::Status sum(Communicator& comm, Bytes& both, const CallOptions& how = {}) {
  return comm.all_reduce(both.data(), both.data(), both.size(), DataType::kU8, ReduceOp::kSum, how);
}

// With kernels, and what a sum by one is taken to cost: so many nanoseconds.
inline gpudirect::CudaMemory::Options with_kernels(double start = 0) {
  gpudirect::SumCosts costs;
  costs.start.fill(start);
  return {
      .kernels = gpudirect::FakeDriver::image(), .table = gpudirect::CopyTable{}, .sums = costs};
}

}  // namespace baton
