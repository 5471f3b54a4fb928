// Normalisation, rotary embedding with the write of K and V, and the optimizer's update.
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
BATON_DEVICE void rotate(Block& block, float* head, uint32_t i, uint32_t half, float c, float s) {
  const float x = block.load(head + i), y = block.load(head + i + half);
  block.store(head + i, x * c - y * s);
  block.store(head + i + half, y * c + x * s);
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
      for (uint32_t i = thread; i < half; i += block.threads()) {
        rotate(block, rotated, i, half, block.load(a.cos + uint64_t{token} * half + i),
               block.load(a.sin + uint64_t{token} * half + i));
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
