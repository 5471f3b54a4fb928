// Segments: equal runs of bytes at a regular distance; and a walk over two of them in lockstep.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace baton::collectives::executor {

// `count` runs of `bytes` bytes, `stride` bytes apart.
struct Segments {
  std::byte* data = nullptr;
  size_t bytes = 0;
  uint32_t count = 1;
  size_t stride = 0;

  size_t total() const { return bytes * count; }
  bool contiguous() const { return count <= 1 || stride == bytes; }
  std::byte* run(uint32_t i) const { return data + i * stride; }
};

// Calls run(a's bytes, b's bytes, how many) for the first min(a.total(), b.total()) bytes of both.
template <typename Run>
void walk(const Segments& a, const Segments& b, Run&& run) {
  const size_t total = std::min(a.total(), b.total());
  if (total == 0) return;
  if (a.contiguous() && b.contiguous()) {
    run(a.data, b.data, total);
    return;
  }
  size_t done = 0, in_a = 0, in_b = 0;  // bytes behind us: in all, in each one's run
  uint32_t run_a = 0, run_b = 0;
  while (done < total) {
    const size_t n = std::min({a.bytes - in_a, b.bytes - in_b, total - done});
    run(a.run(run_a) + in_a, b.run(run_b) + in_b, n);
    done += n;
    if ((in_a += n) == a.bytes) ++run_a, in_a = 0;
    if ((in_b += n) == b.bytes) ++run_b, in_b = 0;
  }
}

inline void copy(const Segments& to, const Segments& from) {
  walk(to, from, [](std::byte* t, std::byte* f, size_t n) { std::memcpy(t, f, n); });
}

}  // namespace baton::collectives::executor
