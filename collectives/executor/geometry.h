// Geometry: where the parts of each piece of a call lie in its buffers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "collectives/schedules/schedule.h"

namespace baton::collectives::executor {

// Segments: equal runs of bytes at a regular distance; and a walk over two of them in lockstep.

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

// Sizes in elements, unless they say bytes. See schedule.h for which part is what.
struct Geometry {
  Collective collective = Collective::kAllReduce;
  size_t element_bytes = 4;
  size_t count = 0;          // of the vector, or of one rank's block
  size_t part_elements = 1;  // of a full part
  uint32_t parts = 1;        // of a piece
  // Blocks of different lengths, in elements: those of all ranks, and where they start in the
  // larger buffer. Null: all are `count` long; else that is the longest.
  const size_t* lengths = nullptr;
  const size_t* starts = nullptr;

  // Data comes in one block per rank, and every piece takes the same range of each.
  bool blocks() const {
    constexpr auto bit = [](Collective each) { return uint32_t{1} << static_cast<int>(each); };
    constexpr uint32_t kWithBlocks = bit(Collective::kReduceScatter) | bit(Collective::kAllGather) |
                                     bit(Collective::kAllToAll) | bit(Collective::kGather) |
                                     bit(Collective::kScatter);
    return (kWithBlocks >> static_cast<int>(collective) & 1) != 0;
  }
  size_t piece_elements() const { return blocks() ? part_elements : part_elements * parts; }
  // At least one: an empty call is one empty piece, and is matched like any other.
  size_t pieces() const {
    const size_t each = piece_elements();
    return count <= each ? 1 : (count + each - 1) / each;
  }
  // The buffer holds the blocks of all ranks, not only our own.
  bool holds_all_blocks(schedules::BufferName buffer) const {
    return buffer == schedules::BufferName::kInput
               ? collective != Collective::kAllGather && collective != Collective::kGather
               : collective != Collective::kReduceScatter && collective != Collective::kScatter;
  }

  // `base` is where the buffer starts. Parts at the end of the data are short or empty. Scratch
  // parts are as long as the longest part of their piece: what lies behind the data in them means
  // nothing, and never gets into an output.
  Segments locate(std::byte* base, schedules::BufferName buffer, uint32_t part, uint32_t number,
                  size_t piece) const {
    Segments place;
    size_t first = 0, run = 0, stride = 0;
    uint32_t runs = 1;
    if (number == 0) return place;
    if (!blocks()) {
      first =
          (buffer == schedules::BufferName::kScratch ? part : piece * parts + part) * part_elements;
      run = number * part_elements;
      if (buffer != schedules::BufferName::kScratch)
        run = first < count ? std::min(run, count - first) : 0;
    } else {
      const size_t begin = piece * part_elements;
      const bool own_length = lengths != nullptr && buffer != schedules::BufferName::kScratch;
      const size_t length = own_length ? lengths[part] : count;
      run = begin < length ? std::min(part_elements, length - begin) : 0;
      if (buffer == schedules::BufferName::kScratch) {
        first = part * part_elements;
        stride = part_elements;
        runs = number;
      } else if (holds_all_blocks(buffer)) {
        first = (starts != nullptr ? starts[part] : part * count) + begin;
        stride = count;
        runs = number;
      } else {
        first = begin;
      }
    }
    // Nothing lies anywhere: the buffer of an empty call may be null.
    place.data = run == 0 ? base : base + first * element_bytes;
    place.bytes = run * element_bytes;
    place.count = runs;
    place.stride = stride * element_bytes;
    if (runs > 1 && stride == run) {
      place.bytes *= runs;
      place.count = 1;
    }
    return place;
  }
};

}  // namespace baton::collectives::executor
