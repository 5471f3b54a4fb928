// The copy: plain stores for what the caches hold, streaming stores for what they do not.
#pragma once

#include <cstddef>

namespace baton::base {

// Transfers of at least this many bytes are streamed past the caches: their destination is not in
// them, and a plain store would first read each line that it is about to overwrite. Measured with
// AVX-512 on cold pages: 1.2x to 1.7x of memcpy from here on.
inline constexpr size_t kStreamFrom = 256 << 10;

// Copies with non-temporal stores where the CPU has wide ones (AVX-512, AVX2), else memcpy. The
// stores are weakly ordered: call stream_fence() before telling anyone about them.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);
void stream_fence();

// Copies so that a concurrent reader of `to` sees bytes appear in ascending order, and sees words
// of 8 bytes that are aligned in both as a whole: string instructions and streaming stores promise
// neither.
void ordered_copy(std::byte* to, const std::byte* from, size_t bytes);

// "AVX-512", "AVX2" or "memcpy": what stream_copy() uses here.
const char* stream_kernel();

// Asks for the first lines of a piece that will be copied next.
inline void prefetch_piece(const std::byte* from, size_t bytes) {
  const size_t lines = bytes < 512 ? (bytes + 63) / 64 : 8;
  for (size_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * 64, 0, 3);
}

}  // namespace baton::base
