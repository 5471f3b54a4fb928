// Rows by number, normalisation, rotary embedding with the write of K and V, activation, and the
// optimizer's update.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// Sixteen threads for a row, each with one of the sixteen sums.
template <class Block>
BATON_DEVICE void rms_norm(Block& block, const RmsNorm& a) {
  constexpr uint32_t kLanes = 16;
  const uint32_t at_once = block.threads() / kLanes;
  float* const squares = block.template shared<float, 256>();
  for (uint32_t base = block.index() * at_once; base < a.rows; base += block.blocks() * at_once) {
    block.each([&](uint32_t thread) {
      const uint32_t row = base + thread / kLanes;
      if (row >= a.rows) return;
      const float* const x = a.x + uint64_t{row} * a.size;
      float sum = 0;
      for (uint32_t i = thread % kLanes; i < a.size; i += kLanes) {
        const float value = block.load(x + i);
        sum = fmaf(value, value, sum);
      }
      squares[thread] = sum;
    });
    block.each([&](uint32_t thread) {
      const uint32_t row = base + thread / kLanes;
      if (row >= a.rows) return;
      float sum = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        sum = sum + squares[thread / kLanes * kLanes + lane];
      }
      const float factor = 1.0f / sqrtf(sum / static_cast<float>(a.size) + a.eps);
      if (a.factors != nullptr && thread % kLanes == 0) block.store(a.factors + row, factor);
      const uint64_t begin = uint64_t{row} * a.size;
      for (uint32_t i = thread % kLanes; i < a.size; i += kLanes) {
        block.store(a.y + begin + i,
                    block.load(a.x + begin + i) * factor * block.load(a.weight + i));
      }
    });
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

template <class Block>
BATON_DEVICE void adamw(Block& block, const AdamW& a) {
  block.each([&](uint32_t thread) {
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    for (uint64_t i = uint64_t{block.index()} * block.threads() + thread; i < a.count; i += step) {
      const float g = block.load(a.gradients + i) / a.divisor * a.factor;
      const float m = a.beta1 * block.load(a.first + i) + (1.0f - a.beta1) * g;
      const float v = a.beta2 * block.load(a.second + i) + (1.0f - a.beta2) * g * g;
      block.store(a.first + i, m);
      block.store(a.second + i, v);
      const float change = m / a.correct1 / (sqrtf(v / a.correct2) + a.epsilon);
      block.store(a.parameters + i, block.load(a.parameters + i) * a.decay - a.rate * change);
    }
  });
}

}  // namespace baton::gpudirect::kernels
