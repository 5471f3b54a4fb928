// Host memory that a device reads and writes: whole pages, for the driver registers pages.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "gpudirect/device.h"

namespace baton::gpudirect {

// Whole pages that no thread has touched yet: they will be on the NUMA node that the device is at,
// where it says which and this process may choose; else wherever they would have been.
void place_near(const Device& device, void* data, size_t bytes);

class RegisteredPages {
 public:
  // At least `bytes`, all zero. Slow; the device outlives it.
  static absl::StatusOr<std::unique_ptr<RegisteredPages>> make(const Device& device, size_t bytes);
  // Nothing on the device uses them any more.
  ~RegisteredPages();
  RegisteredPages(const RegisteredPages&) = delete;
  RegisteredPages& operator=(const RegisteredPages&) = delete;

  // Copies the first bytes to the device and waits until they are there, a second at most.
  absl::Status copy_to(DevicePointer to, size_t bytes) const;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  // For the driver; the host's own, which is the device's too where
  // kCanUseHostPointerForRegisteredMemory.
  DevicePointer address() const {
    return static_cast<DevicePointer>(reinterpret_cast<uintptr_t>(data_));
  }

 private:
  RegisteredPages(const Device& device, void* data, size_t size)
      : device_(device), data_(data), size_(size) {}

  const Device& device_;
  void* const data_;
  const size_t size_;
  bool registered_ = false;
};

}  // namespace baton::gpudirect
