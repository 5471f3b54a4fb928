// A queue in one array that grows when it must and never shrinks: no heap allocation once warm.
#pragma once

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace baton::base {

template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  T& operator[](size_t i) { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  const T& operator[](size_t i) const { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }

  void push_back(T value) {
    if (size_ == slots_.size()) grow();
    ++size_;
    (*this)[size_ - 1] = std::move(value);
  }
  void push_front(T value) {
    if (size_ == slots_.size()) grow();
    head_ = (head_ + slots_.size() - 1) & (slots_.size() - 1);
    ++size_;
    front() = std::move(value);
  }
  void pop_front() {
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
  }
  void clear() { head_ = size_ = 0; }

  // Removes what `gone` says true of, keeping the order; `gone` sees each element once, in order.
  template <typename Predicate>
  void remove_if(Predicate gone) {
    size_t kept = 0;
    for (size_t i = 0; i < size_; ++i) {
      if (gone((*this)[i])) continue;
      if (kept != i) (*this)[kept] = std::move((*this)[i]);
      ++kept;
    }
    size_ = kept;
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    head_ = 0;
  }

  std::vector<T> slots_;  // a power of two of them
  size_t head_ = 0;
  size_t size_ = 0;
};

// A queue in an array of fixed size: first in, first out, and no heap allocation at all.

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
