// The copy kernels and the choice among them, made once from what the CPU has.
#include "transport/base/copies/copy_kernel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton::base {
namespace {

using Kernel = void (*)(std::byte* to, const std::byte* from, size_t bytes);

struct Choice {
  Kernel kernel;
  const char* name;
};

void plain(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }

#if defined(__x86_64__)
constexpr size_t kSmallPage = 4096;
constexpr size_t kLine = 64;

// Four pages side by side: four streams keep more of the memory's banks busy than one.
constexpr size_t kSideBySide = 4;

__attribute__((target("avx512f"))) inline void stream_lines(std::byte* to, const std::byte* from) {
  const __m512i a = _mm512_loadu_si512(from);
  const __m512i b = _mm512_loadu_si512(from + kLine);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to + kLine), b);
}

__attribute__((target("avx512f"))) void avx512(std::byte* to, const std::byte* from, size_t bytes) {
  while (bytes >= kSideBySide * kSmallPage) {
    for (size_t line = 0; line < kSmallPage; line += 2 * kLine) {
      for (size_t page = 0; page < kSideBySide; ++page) {
        const size_t at = page * kSmallPage + line;
        _mm_prefetch(reinterpret_cast<const char*>(from + at + 8 * kLine), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(from + at + 9 * kLine), _MM_HINT_T0);
        stream_lines(to + at, from + at);
      }
    }
    to += kSideBySide * kSmallPage;
    from += kSideBySide * kSmallPage;
    bytes -= kSideBySide * kSmallPage;
  }
  for (; bytes >= 4 * kLine; bytes -= 4 * kLine, to += 4 * kLine, from += 4 * kLine) {
    stream_lines(to, from);
    stream_lines(to + 2 * kLine, from + 2 * kLine);
  }
  std::memcpy(to, from, bytes);
}

__attribute__((target("avx2"))) void avx2(std::byte* to, const std::byte* from, size_t bytes) {
  for (; bytes >= 2 * kLine; bytes -= 2 * kLine, to += 2 * kLine, from += 2 * kLine) {
    const auto* in = reinterpret_cast<const __m256i*>(from);
    auto* out = reinterpret_cast<__m256i*>(to);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2);
    const __m256i d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
  std::memcpy(to, from, bytes);
}

Choice choose() {
  if (__builtin_cpu_supports("avx512f")) return {avx512, "AVX-512"};
  if (__builtin_cpu_supports("avx2")) return {avx2, "AVX2"};
  return {plain, "memcpy"};
}
#else
constexpr size_t kLine = 64;
Choice choose() { return {plain, "memcpy"}; }
#endif

const Choice kChoice = choose();

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
  // Streaming stores write whole lines; what comes before the first of them is copied plainly.
  const size_t before = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  if (before != 0) std::memcpy(to, from, before);
  kChoice.kernel(to + before, from + before, bytes - before);
}

void ordered_copy(std::byte* to, const std::byte* from, size_t bytes) {
  using Pair [[gnu::vector_size(16)]] = uint64_t;
  const auto store = [&]<typename Word>(const Word&) {
    Word word;
    std::memcpy(&word, from, sizeof word);
#if defined(__x86_64__)
    std::atomic_signal_fence(std::memory_order_seq_cst);  // its stores are seen in their order
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
    std::memcpy(to, &word, sizeof word);
    to += sizeof word, from += sizeof word, bytes -= sizeof word;
  };
  while (bytes != 0 && reinterpret_cast<uintptr_t>(to) % sizeof(uint64_t) != 0) store(uint8_t{});
  if (bytes >= sizeof(uint64_t) && reinterpret_cast<uintptr_t>(to) % sizeof(Pair) != 0) {
    store(uint64_t{});
  }
  while (bytes >= sizeof(Pair)) store(Pair{});
  while (bytes >= sizeof(uint64_t)) store(uint64_t{});
  while (bytes != 0) store(uint8_t{});
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

const char* stream_kernel() { return kChoice.name; }

}  // namespace baton::base
