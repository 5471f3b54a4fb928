// Rows from one layout to another, converted on the way or not: a warp for each row.
#pragma once

#include "gpudirect/kernels/copy_pieces-inl.h"

namespace baton::gpudirect::kernels {

// Where a warp's row lies at both ends; nothing where it has none.
struct RowPlace {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::byte* scales = nullptr;
};

template <class Block>
BATON_DEVICE RowPlace place_of_row(Block& block, const Reshard& a, uint64_t item) {
  if (item >= uint64_t{a.count} * a.rows) return {};
  const RowBox box = block.load(a.boxes + item / a.rows);
  auto row = static_cast<uint32_t>(item % a.rows);
  if (row >= box.count[0] * box.count[1] * box.count[2]) return {};
  RowPlace place{box.from, box.to, box.scales};
  for (int d = 2; d >= 0; --d) {
    const int64_t at = row % box.count[d];
    row /= box.count[d];
    place.from += at * box.from_stride[d];
    place.to += at * box.to_stride[d];
    if (place.scales != nullptr) place.scales += at * box.scale_stride[d];
  }
  return place;
}

// The bits of a bf16 number's magnitude as fp32; infinities and NaN count as 0.
BATON_DEVICE uint32_t finite_magnitude(uint32_t half) {
  const uint32_t bits = (half & 0x7fffu) << 16;
  return bits < 0x7f800000u ? bits : 0;
}

// Of the elements of a span that are this lane's: four at a time where the span allows it.
template <class Block>
BATON_DEVICE uint32_t largest_of_lane(Block& block, const std::byte* from, uint32_t span,
                                      uint32_t lane, bool by_four) {
  uint32_t largest = 0;
  if (by_four) {
    for (uint32_t i = lane; i < span / 4; i += 32) {
      const Vector8 four = block.load(reinterpret_cast<const Vector8*>(from) + i);
      for (const uint32_t two : four.word) {
        largest =
            larger(largest, larger(finite_magnitude(two & 0xffffu), finite_magnitude(two >> 16)));
      }
    }
  } else {
    for (uint32_t i = lane; i < span; i += 32) {
      largest = larger(largest,
                       finite_magnitude(block.load(reinterpret_cast<const uint16_t*>(from) + i)));
    }
  }
  return largest;
}

template <class Block>
BATON_DEVICE void convert_lane(Block& block, std::byte* to, const std::byte* from, uint32_t span,
                               float scale, uint32_t lane, bool by_four) {
  const auto code = [&](uint32_t half) { return to_e4m3(from_bf16(half) / scale); };
  if (by_four) {
    for (uint32_t i = lane; i < span / 4; i += 32) {
      const Vector8 four = block.load(reinterpret_cast<const Vector8*>(from) + i);
      block.store(reinterpret_cast<uint32_t*>(to) + i,
                  code(four.word[0] & 0xffffu) | code(four.word[0] >> 16) << 8 |
                      code(four.word[1] & 0xffffu) << 16 | code(four.word[1] >> 16) << 24);
    }
  } else {
    for (uint32_t i = lane; i < span; i += 32) {
      block.store(
          reinterpret_cast<uint8_t*>(to) + i,
          static_cast<uint8_t>(code(block.load(reinterpret_cast<const uint16_t*>(from) + i))));
    }
  }
}

template <class Block>
BATON_DEVICE void convert_rows(Block& block, const Reshard& a) {
  const uint32_t warps = block.threads() / 32;
  const uint64_t items = uint64_t{a.count} * a.rows;
  auto place = block.template per_thread<RowPlace>();
  auto largest = block.template per_thread<uint32_t>();
  for (uint64_t base = uint64_t{block.index()} * warps; base < items;
       base += uint64_t{block.blocks()} * warps) {
    block.each_warp(
        [&](uint32_t thread) { place[thread] = place_of_row(block, a, base + thread / 32); });
    for (uint32_t first = 0; first < a.elements; first += a.span) {
      const auto by_four = [&](uint32_t thread) {
        return a.span % 4 == 0 && reinterpret_cast<uint64_t>(place[thread].from) % 8 == 0 &&
               reinterpret_cast<uint64_t>(place[thread].to) % 4 == 0;
      };
      block.each_warp([&](uint32_t thread) {
        largest[thread] = 0;
        if (place[thread].to == nullptr) return;
        largest[thread] = largest_of_lane(block, place[thread].from + first * 2, a.span,
                                          thread % 32, by_four(thread));
      });
      block.warp_max(largest);
      block.each_warp([&](uint32_t thread) {
        if (place[thread].to == nullptr) return;
        const float scale = e4m3_scale(float_of(largest[thread]));
        if (thread % 32 == 0) {
          block.store(reinterpret_cast<float*>(place[thread].scales) + first / a.span, scale);
        }
        convert_lane(block, place[thread].to + first, place[thread].from + first * 2, a.span, scale,
                     thread % 32, by_four(thread));
      });
    }
  }
}

template <class Block>
BATON_DEVICE void reshard(Block& block, const Reshard& a) {
  if (a.conversion == Conversion::kBf16ToFp8E4m3) {
    convert_rows(block, a);
    return;
  }
  block.each([&](uint32_t thread) {
    const uint32_t warps = block.threads() / 32;
    const uint64_t items = uint64_t{a.count} * a.rows;
    for (uint64_t item = uint64_t{block.index()} * warps + thread / 32; item < items;
         item += uint64_t{block.blocks()} * warps) {
      const RowPlace place = place_of_row(block, a, item);
      if (place.to != nullptr) copy_run(block, place.to, place.from, a.elements, thread % 32);
    }
  });
}

}  // namespace baton::gpudirect::kernels
