// Runs kernels on the host: blocks one after the other, and the threads of a block one after the
// other from barrier to barrier. A seed decides the order of both, so that a missing barrier shows.
//
// Every load and store goes through a view of memory, which says what exists: what is outside, or
// not aligned to its size, ends the kernel, as it would on a GPU. So does a race for shared memory
// between get() and put(), in whatever order the threads ran.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/fragments.h"

namespace baton::gpudirect::kernels {

// Memory as a kernel may see it.
class MemoryView {
 public:
  virtual ~MemoryView() = default;
  // Where the host finds these bytes of a device address; null: the kernel may not touch them.
  virtual std::byte* find(uint64_t at, size_t bytes, bool write) = 0;
};

struct Launch {
  uint32_t blocks = 1;
  uint32_t threads = 1;  // of each block
  uint64_t seed = 1;
  uint32_t large_shared = 0;  // bytes; emulate() knows them
};

// What ends a kernel; thrown through its body.
struct KernelFault {
  std::string what;
};

class EmulatedBlock {
 public:
  EmulatedBlock(MemoryView& memory, const Launch& launch, uint32_t index);

  uint32_t index() const { return index_; }
  uint32_t blocks() const { return launch_.blocks; }
  uint32_t threads() const { return launch_.threads; }

  // Runs every thread up to the next barrier of the block, or of its warp.
  template <class Function>
  void each(const Function& function) {
    each_warp(function);
    ++interval_;
  }
  template <class Function>
  void each_warp(const Function& function) {
    each_free(function);
    ++step_;
  }
  // No thread waits for another.
  template <class Function>
  void each_free(const Function& function) {
    shuffle();
    for (const uint32_t thread : order_) {
      running_ = thread;
      function(thread);
    }
    running_ = kEveryThread;
  }

  // A variable of every thread.
  template <class T>
  std::vector<T> per_thread() const {
    return std::vector<T>(launch_.threads);
  }
  // An array of the block's, of arbitrary content: one for each type and size, as nvcc has it.
  template <class T, uint32_t kCount>
  T* shared() {
    static const char name = 0;
    return reinterpret_cast<T*>(shared_array(&name, sizeof(T) * kCount, kCount == 1));
  }

  // Rules for a shared array: two threads' accesses to the same bytes, one of them a put(), have a
  // barrier between them. A variable, an array of one, is not even put by the thread that got it
  // before the next barrier: compilers read those early, in all threads, whatever the condition.
  template <class T>
  T get(const T* from) {
    touch(from, sizeof(T), alignof(T), Access::kRead);
    T out;
    std::memcpy(&out, from, sizeof(T));
    return out;
  }
  template <class T>
  void put(T* to, const T& value) {
    touch(to, sizeof(T), alignof(T), Access::kWrite);
    std::memcpy(to, &value, sizeof(T));
  }

  // The kernel's further shared memory (large_shared_of()).
  std::byte* large_shared() {
    static const char name = 0;
    return shared_array(&name, launch_.large_shared, false);
  }

  // The largest value of each warp, for all its threads.
  void warp_max(std::vector<uint32_t>& values) const;

  // Gives each thread the value of its neighbour, of 0 and 1, of 2 and 3 and so on.
  template <class T>
  void swap_neighbours(std::vector<T>& values) const {
    for (size_t even = 0; even + 1 < values.size(); even += 2) {
      std::swap(values[even], values[even + 1]);
    }
  }

  // c += a b of each warp, all fragments of a with all of b. In the order of the engine's bf16
  // products: the even and the odd k of the 32 apart, each from zero, then both added; what is
  // smaller than the smallest normal number counts as zero.
  template <class Left, class Right, class Sums>
  void multiply_fragments(const std::vector<Left>& a, const std::vector<Right>& b,
                          std::vector<Sums>& sums) const {
    constexpr size_t kLeft = sizeof(Left) / sizeof(FragmentA);
    constexpr size_t kRight = sizeof(Right) / sizeof(FragmentB);
    FragmentA left[32];
    FragmentB right[32];
    for (size_t warp = 0; warp < sums.size(); warp += 32) {
      for (size_t tile = 0; tile < kLeft * kRight; ++tile) {
        for (size_t lane = 0; lane < 32; ++lane) {
          left[lane] = a[warp + lane].of[tile / kRight];
          right[lane] = b[warp + lane].of[tile % kRight];
        }
        for (uint32_t i = 0; i < 16 * 8; ++i) {
          const uint32_t row = i / 8, column = i % 8;
          FragmentC& c = sums[warp + row % 8 * 4 + column / 2].of[tile];
          float& sum = c.value[row / 8 * 2 + column % 2];
          sum = add_products(left, right, row, column, sum);
        }
      }
    }
  }

  // Four words of each thread's fragments, the number'th: of row lane / 4, those that lane % 4 has,
  // of each of four matrices of eight rows of 16 bytes, whose places in shared memory place(thread)
  // names, eight lanes for each.
  template <class Fragments, class Place>
  void load_fragments(std::vector<Fragments>& to, uint32_t number, const Place& place) const {
    for (uint32_t thread = 0; thread < to.size(); ++thread) {
      const uint32_t warp = thread / 32 * 32, lane = thread % 32;
      for (uint32_t matrix = 0; matrix < 4; ++matrix) {
        const auto* const row = place(warp + matrix * 8 + lane / 4);
        std::memcpy(reinterpret_cast<std::byte*>(&to[thread]) + (number * size_t{4} + matrix) * 4,
                    reinterpret_cast<const std::byte*>(row) + size_t{lane} % 4 * 4, 4);
      }
    }
  }

  // Copies of 16 bytes, or 4, to a shared array: the first `there` of them, and zeros behind; in
  // groups that the running thread ends. They happen when it waits for them, but for the last
  // kOutstanding groups, and not before.
  void copy_16(void* to, const void* from, uint32_t there = 16) { copy(to, from, 16, there); }
  void copy_16_of_line(void* to, const void* from) { copy_16(to, from); }
  void copy_4(void* to, const void* from, uint32_t there = 4) { copy(to, from, 4, there); }
  void end_copies();
  template <uint32_t kOutstanding>
  void wait_copies() {
    wait_copies(kOutstanding);
  }

  // Runs of bytes to a shared array, at most one of each thread of a warp, all of which call this:
  // multiples of 16 bytes, aligned to so many; null: none. They are one use of an arrival, of `all`
  // bytes. From then on anything may be there, until all threads have waited for that use, the
  // number'th, from 0 on; the next one, which goes to the same places, comes behind another
  // barrier. One thread makes an arrival.
  void make_arrival(uint64_t* arrival);
  void copy_runs(uint64_t* arrival, uint32_t all, void* to, const void* from, uint32_t bytes);
  void await_arrival(uint64_t* arrival, uint32_t number);

  // Whether there are copies that no thread has waited for.
  bool copies_wait() const;

  // To an element of a shared array, while others add to it too.
  template <class T>
  void add(T* to, T value) {
    touch(to, sizeof(T), alignof(T), Access::kAdd);
    *to += value;
  }

  template <class T>
  T load(const T* from) {
    T out;
    std::memcpy(&out, reach(from, sizeof(T), alignof(T), false), sizeof(T));
    return out;
  }
  template <class T>
  void store(T* to, T value) {
    std::memcpy(reach(to, sizeof(T), alignof(T), true), &value, sizeof(T));
  }
  // A clock that all blocks and the host share the rate of.
  static uint64_t nanoseconds() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  // Words that others change meanwhile: with the order that their names say.
  uint64_t load_acquire(const uint64_t* from) { return load(from); }
  void store_release(uint64_t* to, uint64_t value) { store(to, value); }

 private:
  // For one element of a warp's c.
  static float add_products(const FragmentA* a, const FragmentB* b, uint32_t row, uint32_t column,
                            float sum);
  struct Copy {
    std::byte* to;
    size_t size;
    std::byte bytes[16] = {};
  };
  // What is outside of each() every thread does.
  static constexpr uint32_t kEveryThread = ~0u;
  enum class Access : uint8_t { kRead, kWrite, kAdd };
  // The last access, and when it was.
  struct Touch {
    uint64_t interval = 0;  // between two barriers of the block
    uint64_t step = 0;      // between two barriers of the warp
    uint32_t thread = 0;
    bool other_warps = false;    // in this interval
    bool other_threads = false;  // in this step
  };
  // What was done to four bytes of a shared array.
  struct SharedWord {
    Touch of[3];  // by Access
  };
  struct SharedArray {
    std::vector<std::byte> bytes;
    std::vector<SharedWord> words;
    bool variable = false;  // an array of one
  };
  struct Arrival {
    uint32_t uses = 0;
    size_t bytes = 0;      // of the last use; 0: it has been waited for
    uint64_t awaited = 0;  // in which interval
    std::vector<std::pair<std::byte*, std::vector<std::byte>>> runs;
  };
  void copy(void* to, const void* from, size_t size, size_t there);
  std::deque<std::vector<Copy>>& copies_of_running();
  void wait_copies(size_t outstanding);
  void shuffle();
  std::byte* shared_array(const void* name, size_t bytes, bool variable);
  SharedArray* array_around(const void* at, size_t bytes);
  void touch(const void* at, size_t bytes, size_t alignment, Access access);
  // Whether the running thread may not do what it does after that.
  bool too_close(const Touch& before) const;
  std::byte* reach(const void* at, size_t bytes, size_t alignment, bool write);

  MemoryView& memory_;
  const Launch& launch_;
  const uint32_t index_;
  std::mt19937_64 random_;
  std::vector<uint32_t> order_;
  std::map<const void*, SharedArray> shared_;
  uint32_t running_ = kEveryThread;
  uint64_t interval_ = 1;  // Touch has 0 of none
  uint64_t step_ = 0;
  std::vector<std::deque<std::vector<Copy>>> copies_;  // of each thread by group, the last one open
  std::map<const uint64_t*, Arrival> arrivals_;
};

// A kernel of the list, by its name in the image ("baton_reduce_sum"): the bytes of its arguments,
// and the threads and the shared memory of its blocks. Nothing for other names.
struct EmulatedKernel {
  size_t argument_bytes = 0;
  uint32_t threads = 0;
  uint32_t large_shared = 0;
  void (*run_block)(EmulatedBlock& block, const void* arguments) = nullptr;
};
std::optional<EmulatedKernel> emulated_kernel(std::string_view name);

// From now on multiply_fragments() adds as tensor cores were seen to (Fasi et al., "Numerical
// behavior of NVIDIA tensor cores", 2021): 16 products at a time and what is there, each cut at the
// place of the largest of them, and the sum cut to fp32. Not thread-safe.
void use_tensor_core_sums(bool on);

// Runs all blocks. What the kernel did wrong, or nothing.
std::optional<std::string> emulate(std::string_view name, const EmulatedKernel& kernel,
                                   const Launch& launch, const void* arguments, MemoryView& memory);

}  // namespace baton::gpudirect::kernels
