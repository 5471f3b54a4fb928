// Memory for kernels in tests: arrays of the host's, of which a kernel may touch these alone.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "tests/gpudirect/kernels/emulation.h"
#include "tests/std.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {

class EmulatedMemory : public MemoryView {
 public:
  // The array must stay where it is.
  template <class T>
  void allow(const std::vector<T>& array, bool writes = false) {
    rows_[reinterpret_cast<uint64_t>(array.data())] = {array.size() * sizeof(T), writes};
  }
  // The same, and where it is: for arguments.
  template <class T>
  const T* read(const std::vector<T>& array) {
    allow(array);
    return array.data();
  }
  template <class T>
  T* write(std::vector<T>& array) {
    allow(array, true);
    return array.data();
  }
  std::byte* find(uint64_t at, size_t bytes, bool write) override {
    auto row = rows_.upper_bound(at);
    if (row == rows_.begin()) return nullptr;
    --row;
    const bool inside = at + bytes <= row->first + row->second.bytes;
    if (!inside || (write && !row->second.writes)) return nullptr;
    return reinterpret_cast<std::byte*>(at);
  }

 private:
  struct Row {
    size_t bytes = 0;
    bool writes = false;
  };
  std::map<uint64_t, Row> rows_;
};

// Runs a kernel of the list over so many blocks. What it did wrong, or nothing.
template <class Arguments>
std::optional<std::string> run_kernel(std::string_view name, const Arguments& arguments,
                                      uint32_t blocks, EmulatedMemory& memory, uint64_t seed = 1) {
  const auto kernel = emulated_kernel(name);
  if (!kernel.has_value() || kernel->argument_bytes != sizeof(Arguments)) {
    return "no such kernel, or not its arguments";
  }
  return emulate(name, *kernel, {blocks, kernel->threads, seed}, &arguments, memory);
}

}  // namespace baton::gpudirect::kernels

// Normally distributed numbers, the same for the same seed: what kernels are tried with.

namespace baton::gpudirect {

inline std::vector<float> normal(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> out(count);
  for (float& value : out) value = distribution(random);
  return out;
}

}  // namespace baton::gpudirect
