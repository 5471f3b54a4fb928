// Arrays aligned to cache lines and vectors; bf16 conversion of single numbers.
#pragma once

#include <sys/mman.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "transport/base/limits/memory_left.h"

namespace baton::engine {

// Fixed-size, zero-initialised (and so already faulted in), 64-byte aligned. Those that nearly fill
// whole huge pages lie on some, where the kernel has any: the processor's prefetching ends at
// pages. Large ones throw base::OutOfMemory where memory is short: the kernel would kill the
// process at the first touch instead.
template <typename T>
class AlignedArray {
 public:
  AlignedArray() = default;
  explicit AlignedArray(size_t size) : data_(allocate(size)), size_(size) {}

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_.get()[i]; }
  const T& operator[](size_t i) const { return data_.get()[i]; }

 private:
  static constexpr size_t kLine = 64;
  static constexpr size_t kHugePage = 2 << 20;
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  static T* allocate(size_t size) {
    const size_t bytes = size * sizeof(T) + kLine;
    const size_t huge = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    const size_t unit = huge - bytes <= bytes / 5 ? kHugePage : kLine;
    const size_t whole = (bytes + unit - 1) / unit * unit;
    base::need_memory(whole);
    void* memory = std::aligned_alloc(unit, whole);
    if (memory == nullptr) throw std::bad_alloc();
    if (unit == kHugePage) madvise(memory, whole, MADV_HUGEPAGE);
    std::memset(memory, 0, whole);
    return static_cast<T*>(memory);
  }
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

inline float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

}  // namespace baton::engine
