// Rows from one layout to another, converted on the way or not: a warp for each row, or for several
// whose spans are short enough to be held.
#pragma once

#include "gpudirect/kernels/copy_pieces-inl.h"

namespace baton::gpudirect::kernels {

// Where a row lies at both ends, or a span of it; nothing where there is none.
struct RowPlace {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::byte* scales = nullptr;
};

template <class Block>
BATON_DEVICE RowPlace place_of_row(Block& block, const Reshard& a, uint64_t item) {
  if (item >= uint64_t{a.count} * a.rows) return {};
  const auto small = static_cast<uint32_t>(item);  // dividing 64 bits takes ten times as long
  const uint64_t number = item == small ? small / a.rows : item / a.rows;
  const RowBox box = block.load(a.boxes + number);
  auto row = static_cast<uint32_t>(item - number * a.rows);
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

// The bits of a magnitude, as above.
BATON_DEVICE uint32_t finite_magnitude_of(float x) {
  const uint32_t bits = bits_of(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0;
}

template <class Block>
BATON_DEVICE float element_of_row(Block& block, const Reshard& a, const std::byte* row,
                                  uint32_t number) {
  const std::byte* const at = row + uint64_t{number} * a.from_element;
  return a.conversion == Conversion::kF32ToFp8E4m3
             ? block.load(reinterpret_cast<const float*>(at))
             : from_bf16(block.load(reinterpret_cast<const uint16_t*>(at)));
}

// The largest of this lane's elements of a span that begins at `first` of the row: four at a time
// where the span allows it.
template <class Block>
BATON_DEVICE uint32_t largest_of_lane(Block& block, const Reshard& a, const std::byte* row,
                                      uint32_t first, uint32_t lane, bool by_four) {
  uint32_t largest = 0;
  if (by_four) {
    const auto* const from = reinterpret_cast<const Vector8*>(row + first * 2);
    for (uint32_t i = lane; i < a.span / 4; i += 32) {
      const Vector8 four = block.load(from + i);
      for (const uint32_t two : four.word) {
        largest =
            larger(largest, larger(finite_magnitude(two & 0xffffu), finite_magnitude(two >> 16)));
      }
    }
  } else {
    for (uint32_t i = lane; i < a.span; i += 32) {
      largest = larger(largest, finite_magnitude_of(element_of_row(block, a, row, first + i)));
    }
  }
  return largest;
}

template <class Block>
BATON_DEVICE void convert_lane(Block& block, const Reshard& a, const RowPlace& row, uint32_t first,
                               float scale, uint32_t lane, bool by_four) {
  if (by_four) {
    const auto code = [&](uint32_t half) { return to_e4m3_of_span(half, scale); };
    const auto* const from = reinterpret_cast<const Vector8*>(row.from + first * 2);
    for (uint32_t i = lane; i < a.span / 4; i += 32) {
      const Vector8 four = block.load(from + i);
      block.store(reinterpret_cast<uint32_t*>(row.to + first) + i,
                  code(four.word[0] & 0xffffu) | code(four.word[0] >> 16) << 8 |
                      code(four.word[1] & 0xffffu) << 16 | code(four.word[1] >> 16) << 24);
    }
  } else {
    for (uint32_t i = first + lane; i < first + a.span; i += 32) {
      const uint32_t bits = bits_of(element_of_row(block, a, row.from, i));
      const uint32_t code = to_e4m3(gpu_quotient(float_of(bits & 0x7fffffffu), scale));
      block.store(reinterpret_cast<uint8_t*>(row.to + uint64_t{i} * a.to_element),
                  static_cast<uint8_t>(code | (bits >> 24 & 0x80u)));
    }
  }
}

template <class Block>
BATON_DEVICE void convert_rows(Block& block, const Reshard& a) {
  const uint32_t warps = block.threads() / 32;
  const uint64_t items = uint64_t{a.count} * a.rows;
  const bool close = is_close_bf16(a) && a.span % 4 == 0;
  auto place = block.template per_thread<RowPlace>();
  auto largest = block.template per_thread<uint32_t>();
  for (uint64_t base = uint64_t{block.index()} * warps; base < items;
       base += uint64_t{block.blocks()} * warps) {
    block.each_warp(
        [&](uint32_t thread) { place[thread] = place_of_row(block, a, base + thread / 32); });
    for (uint32_t first = 0; first < a.elements; first += a.span) {
      const auto by_four = [&](uint32_t thread) {
        return close && reinterpret_cast<uint64_t>(place[thread].from) % 8 == 0 &&
               reinterpret_cast<uint64_t>(place[thread].to) % 4 == 0;
      };
      block.each_warp([&](uint32_t thread) {
        largest[thread] = 0;
        if (place[thread].to == nullptr) return;
        largest[thread] =
            largest_of_lane(block, a, place[thread].from, first, thread % 32, by_four(thread));
      });
      block.warp_max(largest);
      block.each_warp([&](uint32_t thread) {
        if (place[thread].to == nullptr) return;
        const float scale = e4m3_scale(float_of(largest[thread]));
        if (thread % 32 == 0) {
          block.store(reinterpret_cast<float*>(place[thread].scales +
                                               uint64_t{first / a.span} * a.scale_element),
                      scale);
        }
        convert_lane(block, a, place[thread], first, scale, thread % 32, by_four(thread));
      });
    }
  }
}

// Spans that a warp holds at once: each in a group of lanes, eight elements in a lane, and several
// in each group.
inline constexpr uint32_t kSpanRounds = 4;
struct HeldSpans {
  Vector16 of[kSpanRounds];
};
// The largest magnitudes of two rounds each, whatever they are: infinities and NaN are the largest.
struct SpanMaxima {
  uint32_t word[kSpanRounds / 2];
};

BATON_DEVICE uint32_t lanes_of_span(uint32_t span) {
  uint32_t lanes = kSpanRounds;  // fewer would give a warp more than 32 spans at once
  while (lanes * 8 < span) lanes *= 2;
  return lanes;
}

template <class Block>
BATON_DEVICE RowPlace place_of_span(Block& block, const Reshard& a, uint64_t item, uint32_t spans) {
  const uint64_t row = spans == 1 ? item : item / spans;
  const auto number = static_cast<uint32_t>(item - row * spans);
  RowPlace place = place_of_row(block, a, row);
  if (place.to == nullptr) return {};
  place.from += uint64_t{number} * a.span * 2;
  place.to += uint64_t{number} * a.span;
  place.scales += uint64_t{number} * sizeof(float);
  return place;
}

// Whether it can be read and written eight elements at once.
BATON_DEVICE bool is_whole(const RowPlace& place) {
  return reinterpret_cast<uint64_t>(place.from) % 16 == 0 &&
         reinterpret_cast<uint64_t>(place.to) % 8 == 0;
}

BATON_DEVICE uint32_t largest_half(const Vector16& eight) {
  uint32_t two = 0;
  BATON_UNROLL for (uint32_t w = 0; w < 4; ++w) {
    two = larger_halves(two, eight.word[w] & 0x7fff7fffu);
  }
  return larger(two & 0xffffu, two >> 16);
}
BATON_DEVICE Vector8 codes_of(const Vector16& eight, const SpanScale& scale) {
  Vector8 codes;
  BATON_UNROLL for (uint32_t w = 0; w < 2; ++w) {
    const uint32_t low = eight.word[2 * w], high = eight.word[2 * w + 1];
    codes.word[w] = to_e4m3_pair(quotient(float_of(low << 16), scale),
                                 quotient(float_of(low & 0xffff0000u), scale)) |
                    to_e4m3_pair(quotient(float_of(high << 16), scale),
                                 quotient(float_of(high & 0xffff0000u), scale))
                        << 16;
  }
  return codes;
}

// Converts a span with infinities, NaN or a tiny scale, or one that is not aligned: element by
// element, by the lanes of its group.
template <class Block>
BATON_DEVICE void convert_rare_span(Block& block, const Reshard& a, const RowPlace& place,
                                    uint32_t part, uint32_t lanes) {
  const auto* const from = reinterpret_cast<const uint16_t*>(place.from);
  uint32_t largest = 0;
  for (uint32_t i = 0; i < a.span; ++i) {
    largest = larger(largest, finite_magnitude(block.load(from + i)));
  }
  const float scale = e4m3_scale(float_of(largest));
  if (part == 0) block.store(reinterpret_cast<float*>(place.scales), scale);
  for (uint32_t i = part; i < a.span; i += lanes) {
    block.store(reinterpret_cast<uint8_t*>(place.to) + i,
                static_cast<uint8_t>(to_e4m3_of_span(block.load(from + i), scale)));
  }
}

template <class Block>
BATON_DEVICE void convert_held_spans(Block& block, const Reshard& a) {
  const uint32_t lanes = lanes_of_span(a.span), groups = 32 / lanes;
  const uint32_t spans = a.elements / a.span;
  const uint64_t items = uint64_t{a.count} * a.rows * spans;
  RowPlace* const places = block.template shared<RowPlace, 256>();
  auto held = block.template per_thread<HeldSpans>();
  auto maxima = block.template per_thread<SpanMaxima>();
  for (uint64_t base = uint64_t{block.index()} * block.threads(); base < items;
       base += uint64_t{block.blocks()} * block.threads()) {
    // A thread finds the place of one span; 32 of them are the warp's.
    block.each_warp([&](uint32_t thread) {
      block.put(places + thread, place_of_span(block, a, base + thread, spans));
    });
    for (uint32_t first = 0; first < 32; first += groups * kSpanRounds) {
      const auto place_at = [&](uint32_t thread, uint32_t round) {
        const uint32_t number = first + round * groups + thread % 32 / lanes;
        return block.get(places + thread / 32 * 32 + number);
      };
      block.each_warp([&](uint32_t thread) {
        const uint32_t part = thread % lanes;
        BATON_UNROLL for (uint32_t round = 0; round < kSpanRounds; ++round) {
          const RowPlace place = place_at(thread, round);
          held[thread].of[round] = {};
          if (place.to != nullptr && is_whole(place) && part * 8 < a.span) {
            held[thread].of[round] =
                block.load(reinterpret_cast<const Vector16*>(place.from) + part);
          }
        }
        BATON_UNROLL for (uint32_t pair = 0; pair < kSpanRounds / 2; ++pair) {
          maxima[thread].word[pair] = largest_half(held[thread].of[2 * pair]) |
                                      largest_half(held[thread].of[2 * pair + 1]) << 16;
        }
      });
      block.group_max_halves(maxima, lanes);
      block.each_warp([&](uint32_t thread) {
        const uint32_t part = thread % lanes;
        BATON_UNROLL for (uint32_t round = 0; round < kSpanRounds; ++round) {
          const RowPlace place = place_at(thread, round);
          if (place.to == nullptr) continue;
          const uint32_t largest = maxima[thread].word[round / 2] >> round % 2 * 16 & 0xffffu;
          if (!is_whole(place) || !has_fast_scale(largest)) {
            convert_rare_span(block, a, place, part, lanes);
            continue;
          }
          const SpanScale scale = fast_scale(largest);
          if (part * 8 < a.span) {
            block.store(reinterpret_cast<Vector8*>(place.to) + part,
                        codes_of(held[thread].of[round], scale));
          }
          if (part == 0) block.store(reinterpret_cast<float*>(place.scales), scale.scale);
        }
      });
    }
  }
}

template <class Block>
BATON_DEVICE void reshard(Block& block, const Reshard& a) {
  if (holds_spans(a)) return convert_held_spans(block, a);
  if (a.conversion != Conversion::kNone) return convert_rows(block, a);
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
