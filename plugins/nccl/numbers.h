// Handles for NCCL: a comm, a context or registered memory is a number, not a pointer, so that a
// handle that is closed, of another kind or invented is an error and not a crash.
//
// Threads: any. find() is one load. A number is reused only after all others were used.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace baton::nccl {

// From kFirst on; each kind has a range of its own. Constant-initialised, for objects of the
// process that need no end.
template <typename T, uintptr_t kFirst, uintptr_t kMost>
class Numbers {
 public:
  // 0: all are in use.
  uintptr_t give(T& thing) {
    const std::lock_guard lock(mutex_);
    for (uintptr_t tries = 1; tries < kMost; ++tries) {
      const uintptr_t at = (last_ + tries) % kMost;
      if (kFirst + at == 0 || all_[at].load(std::memory_order_relaxed) != nullptr) continue;
      all_[at].store(&thing, std::memory_order_release);
      last_ = at;
      return kFirst + at;
    }
    return 0;
  }
  // Null: there is no such number.
  T* find(uintptr_t number) const {
    const uintptr_t at = number - kFirst;
    return at < kMost ? all_[at].load(std::memory_order_acquire) : nullptr;
  }
  T* find(const void* handle) const { return find(reinterpret_cast<uintptr_t>(handle)); }
  // Ends it. Of several callers one gets what it stood for.
  T* take(uintptr_t number) {
    const uintptr_t at = number - kFirst;
    return at < kMost ? all_[at].exchange(nullptr, std::memory_order_acq_rel) : nullptr;
  }
  T* take(const void* handle) { return take(reinterpret_cast<uintptr_t>(handle)); }
  // Ends it if it still stands for that.
  void end(uintptr_t number, T& thing) {
    T* expected = &thing;
    if (number - kFirst < kMost) all_[number - kFirst].compare_exchange_strong(expected, nullptr);
  }
  // Ends all: in a forked child, which has none of its parent's.
  void clear() {
    for (auto& one : all_) one.store(nullptr, std::memory_order_relaxed);
  }

 private:
  std::array<std::atomic<T*>, kMost> all_{};
  std::mutex mutex_;
  uintptr_t last_ = 0;
};

inline void* as_handle(uintptr_t number) { return reinterpret_cast<void*>(number); }

}  // namespace baton::nccl
