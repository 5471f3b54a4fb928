// A queue in an array of fixed size: first in, first out, and no heap allocation at all.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

namespace baton::base {

// Pushers must check that there is room. An item keeps its contents until it is pushed over.
template <typename T, size_t kCapacity>
class FixedQueue {
 public:
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  T& operator[](size_t i) { return items_[(head_ + i) % kCapacity]; }
  const T& operator[](size_t i) const { return items_[(head_ + i) % kCapacity]; }
  const T& front() const { return (*this)[0]; }

  // A place at the end, to be filled in.
  T& push() { return (*this)[count_++]; }
  void push(T item) { push() = std::move(item); }
  void pop() {
    head_ = (head_ + 1) % kCapacity;
    --count_;
  }
  // The i-th from the front.
  void remove_at(size_t i) {
    for (; i + 1 < count_; ++i) (*this)[i] = std::move((*this)[i + 1]);
    --count_;
  }
  // All that are equal to `item`.
  void remove(const T& item) {
    size_t kept = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (!((*this)[i] == item)) (*this)[kept++] = (*this)[i];
    }
    count_ = kept;
  }

 private:
  std::array<T, kCapacity> items_{};
  size_t head_ = 0;
  size_t count_ = 0;
};

}  // namespace baton::base
