// A vector for a collective, in the host's memory or in a device's.
#pragma once

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

}  // namespace baton
