// Rows by number, normalisation, rotary embedding with the write of K and V, activation, and the
// optimizer's update.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/lanes-inl.h"

namespace baton::gpudirect::kernels {

// Rows that a block lays into shared memory at once, kRowLanes further apart than they are long: so
// two lanes of the same number are in different banks.
inline constexpr uint32_t kNormStage = kHeldRow + 16 * kRowLanes;
struct NormRows {
  uint32_t at_once;
  uint32_t share;  // threads of each
  uint32_t stride;
};

template <class Block>
BATON_DEVICE void hold_norm_rows(Block& block, const RmsNorm& a, const NormRows& rows,
                                 uint32_t base, uint32_t thread, Held& held) {
  const uint32_t row = base + thread / rows.share;
  if (thread / rows.share >= rows.at_once || row >= a.rows) return;
  const auto* const x = reinterpret_cast<const Vector16*>(a.x + uint64_t{row} * a.size);
  BATON_UNROLL for (uint32_t j = 0; j < kHeld; ++j) {
    const uint32_t i = thread % rows.share + j * rows.share;
    if (i < a.size / 4) held.of[j] = block.load(x + i);
  }
}

BATON_DEVICE float norm_factor(const RmsNorm& a, float sum) {
  return 1.0f / sqrtf(sum / static_cast<float>(a.size) + a.eps);
}

// A block's rows are read once; the next ones are, while these are handled.
template <class Block>
BATON_DEVICE void norm_held_rows(Block& block, const RmsNorm& a) {
  auto* const stage = reinterpret_cast<float*>(block.template shared<Vector16, kNormStage / 4>());
  float* const squares = block.template shared<float, 256>();
  NormRows rows = {};
  rows.stride = a.size + kRowLanes;
  rows.at_once = smaller(kNormStage / rows.stride, block.threads() / kRowLanes);
  rows.share = block.threads() / rows.at_once;
  const uint32_t step = block.blocks() * rows.at_once, vectors = a.size / 4;
  auto held = block.template per_thread<Held>();
  uint32_t base = block.index() * rows.at_once;
  block.each_warp(
      [&](uint32_t thread) { hold_norm_rows(block, a, rows, base, thread, held[thread]); });
  for (; base < a.rows; base += step) {
    block.each([&](uint32_t thread) {
      const uint32_t own = thread / rows.share;
      auto* const to = reinterpret_cast<Vector16*>(stage + own * rows.stride);
      BATON_UNROLL for (uint32_t j = 0; j < kHeld; ++j) {
        const uint32_t i = thread % rows.share + j * rows.share;
        if (own < rows.at_once && i < vectors) block.put(to + i, held[thread].of[j]);
      }
      hold_norm_rows(block, a, rows, base + step, thread, held[thread]);
    });
    block.each([&](uint32_t thread) {
      const uint32_t own = thread / kRowLanes;
      if (own >= rows.at_once || base + own >= a.rows) return;
      block.put(squares + thread,
                add_lane(block, stage + own * rows.stride + thread % kRowLanes, a.size / kRowLanes,
                         [](float sum, float x) { return fmaf(x, x, sum); }));
    });
    block.each([&](uint32_t thread) {
      const uint32_t own = thread / rows.share, row = base + own;
      if (own >= rows.at_once || row >= a.rows) return;
      const float factor = norm_factor(a, sum_of_lanes(block, squares + own * kRowLanes));
      if (a.factors != nullptr && thread % rows.share == 0) block.store(a.factors + row, factor);
      const auto* const weights = reinterpret_cast<const Vector16*>(a.weight);
      const auto* const from = reinterpret_cast<const Vector16*>(stage + own * rows.stride);
      auto* const y = reinterpret_cast<Vector16*>(a.y + uint64_t{row} * a.size);
      BATON_UNROLL_BY_4
      for (uint32_t i = thread % rows.share; i < vectors; i += rows.share) {
        const Vector16 weight = block.load(weights + i);
        Vector16 x = block.get(from + i);
        BATON_UNROLL for (uint32_t e = 0; e < 4; ++e) {
          x.word[e] = bits_of(float_of(x.word[e]) * factor * float_of(weight.word[e]));
        }
        block.store(y + i, x);
      }
    });
  }
}

// A longer row, or one that is not aligned: it is read twice, and added up piece by piece.
template <class Block>
BATON_DEVICE void norm_long_rows(Block& block, const RmsNorm& a) {
  auto* const stage = reinterpret_cast<float*>(block.template shared<Vector16, kNormStage / 4>());
  float* const squares = block.template shared<float, 256>();
  for (uint32_t row = block.index(); row < a.rows; row += block.blocks()) {
    const uint64_t at = uint64_t{row} * a.size;
    for (uint32_t begin = 0; begin < a.size; begin += kHeldRow) {
      const uint32_t length = smaller(kHeldRow, a.size - begin);
      block.each([&](uint32_t thread) {
        BATON_UNROLL_BY_4
        for (uint32_t i = thread; i < length; i += block.threads()) {
          block.put(stage + i, block.load(a.x + at + begin + i));
        }
      });
      block.each([&](uint32_t thread) {
        if (thread >= kRowLanes) return;
        block.put(squares + thread, add_lane(
                                        block, stage + thread, length / kRowLanes,
                                        [](float sum, float x) { return fmaf(x, x, sum); },
                                        begin == 0 ? 0.0f : block.get(squares + thread)));
      });
    }
    block.each([&](uint32_t thread) {
      const float factor = norm_factor(a, sum_of_lanes(block, squares));
      if (a.factors != nullptr && thread == 0) block.store(a.factors + row, factor);
      BATON_UNROLL_BY_4
      for (uint32_t i = thread; i < a.size; i += block.threads()) {
        block.store(a.y + at + i, block.load(a.x + at + i) * factor * block.load(a.weight + i));
      }
    });
  }
}

template <class Block>
BATON_DEVICE void rms_norm(Block& block, const RmsNorm& a) {
  if (a.size <= kHeldRow && aligned_16(a.x) && aligned_16(a.weight) && aligned_16(a.y)) {
    norm_held_rows(block, a);
  } else {
    norm_long_rows(block, a);
  }
}

// A pair of elements of one head, rotated in place.
template <class Block>
BATON_DEVICE void rotate(Block& block, float* head, uint32_t i, uint32_t half, float c, float s,
                         float scale) {
  const float x = block.load(head + i), y = block.load(head + i + half);
  block.store(head + i, (x * c - y * s) * scale);
  block.store(head + i + half, (y * c + x * s) * scale);
}

// A block for each token and head; heads of q come first, then those of k with their v.
template <class Block>
BATON_DEVICE void rope_store(Block& block, const RopeStore& a) {
  const uint32_t dim = a.cache.head_dim, half = dim / 2;
  const uint32_t q_heads = a.q == nullptr ? 0 : a.heads;
  const uint32_t heads = q_heads + a.cache.kv_heads;
  for (uint64_t item = block.index(); item < uint64_t{a.tokens} * heads; item += block.blocks()) {
    const auto token = static_cast<uint32_t>(item / heads);
    const auto head = static_cast<uint32_t>(item % heads);
    const uint32_t kv_head = head - q_heads;
    const uint64_t kv_at = (uint64_t{token} * a.cache.kv_heads + kv_head) * dim;
    float* const rotated =
        head < q_heads ? a.q + (uint64_t{token} * q_heads + head) * dim : a.k + kv_at;
    block.each([&](uint32_t thread) {
      const uint32_t angle = a.positions == nullptr ? token : block.load(a.positions + token);
      for (uint32_t i = thread; i < half; i += block.threads()) {
        const uint64_t at = uint64_t{angle} * half + i;
        rotate(block, rotated, i, half, block.load(a.cos + at), block.load(a.sin + at),
               head < q_heads ? a.q_scale : 1.0f);
      }
    });
    if (head < q_heads) continue;
    block.each([&](uint32_t thread) {
      const uint32_t slot = block.load(a.slots + token);
      const uint64_t head_elements = uint64_t{2} * dim * kBlockTokens;
      uint16_t* const key =
          a.cache.base +
          (uint64_t{slot / kBlockTokens} * a.cache.kv_heads + kv_head) * head_elements;
      uint16_t* const value = key + dim * kBlockTokens + uint64_t{slot % kBlockTokens} * dim;
      for (uint32_t d = thread; d < dim; d += block.threads()) {
        block.store(key + d * kBlockTokens + slot % kBlockTokens,
                    static_cast<uint16_t>(to_bf16(block.load(a.k + kv_at + d))));
        block.store(value + d, static_cast<uint16_t>(to_bf16(block.load(a.v + kv_at + d))));
      }
    });
  }
}

// A block for each row; 8 elements at a time.
template <class Block>
BATON_DEVICE void gather_rows(Block& block, const GatherRows& a) {
  const uint32_t vectors = a.size / 8;
  block.each([&](uint32_t thread) {
    for (uint32_t row = block.index(); row < a.count; row += block.blocks()) {
      const uint64_t from = uint64_t{block.load(a.rows + row)} * a.size;
      auto* const to = reinterpret_cast<Vector16*>(a.out + uint64_t{row} * a.size);
      for (uint32_t i = thread; i < vectors; i += block.threads()) {
        Vector16 low = {}, high = {};
        if (a.element == Element::kBF16) {
          const auto* const table = static_cast<const uint16_t*>(a.table) + from;
          const Vector16 half = block.load(reinterpret_cast<const Vector16*>(table) + i);
          for (uint32_t e = 0; e < 2; ++e) {
            low.word[2 * e] = half.word[e] << 16;
            low.word[2 * e + 1] = half.word[e] & 0xffff0000u;
            high.word[2 * e] = half.word[2 + e] << 16;
            high.word[2 * e + 1] = half.word[2 + e] & 0xffff0000u;
          }
        } else {
          const auto* const table = static_cast<const float*>(a.table) + from;
          low = block.load(reinterpret_cast<const Vector16*>(table) + 2 * i);
          high = block.load(reinterpret_cast<const Vector16*>(table) + 2 * i + 1);
        }
        block.store(to + 2 * i, low);
        block.store(to + 2 * i + 1, high);
      }
    }
  });
}

template <class Block>
BATON_DEVICE void round_rows(Block& block, const RoundRows& a) {
  block.each([&](uint32_t thread) {
    for (uint32_t row = block.index(); row < a.rows; row += block.blocks()) {
      const auto* const from = reinterpret_cast<const Vector16*>(a.from + uint64_t{row} * a.stride);
      auto* const to = reinterpret_cast<Vector16*>(a.to + uint64_t{row} * a.size);
      for (uint32_t i = thread; i < a.size / 8; i += block.threads()) {
        const Vector16 low = block.load(from + 2 * i), high = block.load(from + 2 * i + 1);
        Vector16 half = {};
        for (uint32_t e = 0; e < 2; ++e) {
          half.word[e] = to_bf16(float_of(low.word[2 * e])) | to_bf16(float_of(low.word[2 * e + 1]))
                                                                  << 16;
          half.word[2 + e] =
              to_bf16(float_of(high.word[2 * e])) | to_bf16(float_of(high.word[2 * e + 1])) << 16;
        }
        block.store(to + i, half);
      }
    }
  });
}

template <class Block>
BATON_DEVICE void swiglu(Block& block, const SwiGlu& a) {
  block.each([&](uint32_t thread) {
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    const uint64_t all = uint64_t{a.rows} * a.size;
    for (uint64_t i = uint64_t{block.index()} * block.threads() + thread; i < all; i += step) {
      const uint64_t at = i / a.size * 2 * a.size + i % a.size;
      const float gate = block.load(a.gate_up + at);
      const float silu = gate / (1.0f + exponential(-gate));
      block.store(a.out + i, silu * block.load(a.gate_up + at + a.size));
    }
  });
}

// A parameter and its moments.
struct Updated {
  float parameter;
  float first;
  float second;
};
BATON_DEVICE Updated update_of(const AdamW& a, const Updated& before, float gradient) {
  const float g = gradient / a.divisor * a.factor;
  const float m = a.beta1 * before.first + (1.0f - a.beta1) * g;
  const float v = a.beta2 * before.second + (1.0f - a.beta2) * g * g;
  const float change = m / a.correct1 / (sqrtf(v / a.correct2) + a.epsilon);
  return {before.parameter * a.decay - a.rate * change, m, v};
}

// Four parameters at a time where all arrays are aligned to 16 bytes, then one.
template <class Block>
BATON_DEVICE void adamw(Block& block, const AdamW& a) {
  const bool whole = aligned_16(a.parameters) && aligned_16(a.first) && aligned_16(a.second) &&
                     aligned_16(a.gradients);
  const uint64_t vectors = whole ? a.count / 4 : 0;
  block.each([&](uint32_t thread) {
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    const uint64_t begin = uint64_t{block.index()} * block.threads() + thread;
    for (uint64_t i = begin; i < vectors; i += step) {
      Vector16 p = load_four(block, a.parameters + 4 * i);
      Vector16 m = load_four(block, a.first + 4 * i);
      Vector16 v = load_four(block, a.second + 4 * i);
      const Vector16 g = load_four(block, a.gradients + 4 * i);
      BATON_UNROLL for (uint32_t e = 0; e < 4; ++e) {
        const Updated now =
            update_of(a, {float_of(p.word[e]), float_of(m.word[e]), float_of(v.word[e])},
                      float_of(g.word[e]));
        p.word[e] = bits_of(now.parameter);
        m.word[e] = bits_of(now.first);
        v.word[e] = bits_of(now.second);
      }
      store_four(block, a.first + 4 * i, m);
      store_four(block, a.second + 4 * i, v);
      store_four(block, a.parameters + 4 * i, p);
    }
    for (uint64_t i = 4 * vectors + begin; i < a.count; i += step) {
      const Updated now = update_of(
          a, {block.load(a.parameters + i), block.load(a.first + i), block.load(a.second + i)},
          block.load(a.gradients + i));
      block.store(a.first + i, now.first);
      block.store(a.second + i, now.second);
      block.store(a.parameters + i, now.parameter);
    }
  });
}

}  // namespace baton::gpudirect::kernels
