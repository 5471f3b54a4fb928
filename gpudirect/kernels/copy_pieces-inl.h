// Copies of many pieces: a warp for each 2 KiB of each.
//
// A kernel is a function template over its block: CudaBlock in kernels.cu, EmulatedBlock in
// tests/gpudirect/kernels/emulation.h. block.each() runs a function for every thread and ends with
// a barrier.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// Elements of T, `lane` of 32 taking every 32nd: four are read before the first is written.
template <class T, class Block>
BATON_DEVICE void copy_elements(Block& block, std::byte* to, const std::byte* from, uint32_t count,
                                uint32_t lane) {
  const T* const source = reinterpret_cast<const T*>(from);
  T* const target = reinterpret_cast<T*>(to);
  uint32_t i = lane;
  for (; i + 96 < count; i += 128) {
    const T a = block.load(source + i), b = block.load(source + i + 32),
            c = block.load(source + i + 64), d = block.load(source + i + 96);
    block.store(target + i, a);
    block.store(target + i + 32, b);
    block.store(target + i + 64, c);
    block.store(target + i + 96, d);
  }
  for (; i < count; i += 32) block.store(target + i, block.load(source + i));
}

// A run of bytes, by one warp, in the largest units that both ends are aligned to.
template <class Block>
BATON_DEVICE void copy_run(Block& block, std::byte* to, const std::byte* from, uint32_t bytes,
                           uint32_t lane) {
  const uint64_t both = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from);
  uint32_t whole = 0;
  if (both % 16 == 0) {
    copy_elements<Vector16>(block, to, from, bytes / 16, lane);
    whole = bytes / 16 * 16;
  } else if (both % 4 == 0) {
    copy_elements<uint32_t>(block, to, from, bytes / 4, lane);
    whole = bytes / 4 * 4;
  }
  copy_elements<uint8_t>(block, to + whole, from + whole, bytes - whole, lane);
}

template <class Block>
BATON_DEVICE void copy_pieces(Block& block, const CopyPieces& a) {
  block.each([&](uint32_t thread) {
    const uint64_t warps = uint64_t{block.blocks()} * (block.threads() / 32);
    const uint64_t items = uint64_t{a.count} * a.chunks;
    for (uint64_t item = uint64_t{block.index()} * (block.threads() / 32) + thread / 32;
         item < items; item += warps) {
      const Piece piece = block.load(a.pieces + item / a.chunks);
      const uint64_t begin = item % a.chunks * kChunkBytes;
      if (begin >= piece.bytes) continue;
      const auto bytes = static_cast<uint32_t>(smaller(piece.bytes - begin, uint64_t{kChunkBytes}));
      copy_run(block, piece.to + begin, piece.from + begin, bytes, thread % 32);
    }
  });
}

}  // namespace baton::gpudirect::kernels
