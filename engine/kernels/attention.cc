// Paged attention: tiles of up to 8 queries share every load of K and V.
#include "engine/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/kernels/aligned.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "engine/kernels/attention.cc"
#include "engine/kernels/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"

#include "engine/kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace baton::engine {
namespace HWY_NAMESPACE {

// Every line, far ahead, into L2: blocks lie anywhere, so that the processor foresees little.
constexpr int kAhead = 8;  // blocks
// Vectors of bf16 in a cache line.
constexpr int kLine = static_cast<int>(64 / (sizeof(uint16_t) * kLanes));

// Up to kRows queries (token, head) with a common KV head.
struct Tile {
  const float* q[8];
  float* out[8];
  int first[8];  // first position the query sees; ascending
  int last[8];   // last position the query sees; ascending
  int first_block;
};

// scores[row][16 * (block - first_block) + slot] = q . k, -inf where the row does not see the slot;
// maximum[row] = largest score.
template <int kRows>
BATON_INLINE void score_pass(const AttentionCall& call, const Tile& tile, int blocks,
                             float* HWY_RESTRICT scores, size_t stride, float* maximum) {
  const F f;
  const int dims = call.cache->geometry().head_dim;
  const V lowest = hn::Set(f, -HUGE_VALF);
  V best[kRows];
  for (int r = 0; r < kRows; ++r) best[r] = lowest;
  for (int b = tile.first_block; b < blocks; ++b) {
    const uint16_t* key = call.cache->key(call.layer, call.block_table[b], call.kv_head);
    // Behind the last keys come the first values.
    const int next = b + kAhead;
    const uint16_t* ahead =
        next < blocks
            ? call.cache->key(call.layer, call.block_table[next], call.kv_head)
            : call.cache->value(
                  call.layer,
                  call.block_table[std::min(tile.first_block + next - blocks, blocks - 1)],
                  call.kv_head);
    for (size_t lane = 0; lane < kBlockTokens; lane += kLanes) {
      // Two chains a row, of even and of odd dimensions: one alone would wait for itself.
      V sum[kRows], odd[kRows];
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r] = odd[r] = hn::Zero(f);
      for (int d = 0; d < dims; d += 2) {
        __builtin_prefetch(ahead + d * kBlockTokens, 0, 2);
        const V k0 = load_bf16(key + d * kBlockTokens + lane);
        const V k1 = load_bf16(key + (d + 1) * kBlockTokens + lane);
        BATON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sum[r] = hn::MulAdd(hn::Set(f, tile.q[r][d]), k0, sum[r]);
          odd[r] = hn::MulAdd(hn::Set(f, tile.q[r][d + 1]), k1, odd[r]);
        }
      }
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) sum[r] = hn::Add(sum[r], odd[r]);
      const int slot0 = b * kBlockTokens + static_cast<int>(lane);
      const V position = hn::Iota(f, static_cast<float>(slot0));
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (slot0 + static_cast<int>(kLanes) > tile.last[r] + 1) {
          const V last = hn::Set(f, static_cast<float>(tile.last[r]));
          sum[r] = hn::IfThenElse(hn::Le(position, last), sum[r], lowest);
        }
        if (slot0 < tile.first[r]) {
          const V first = hn::Set(f, static_cast<float>(tile.first[r]));
          sum[r] = hn::IfThenElse(hn::Ge(position, first), sum[r], lowest);
        }
        best[r] = hn::Max(best[r], sum[r]);
        hn::StoreU(sum[r], f, scores + r * stride + slot0 - tile.first_block * kBlockTokens);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) maximum[r] = hn::GetLane(hn::MaxOfLanes(f, best[r]));
}

// scores = exp(scores - maximum) in place; returns their sum.
BATON_INLINE float exp_pass(float* HWY_RESTRICT scores, int count, float maximum) {
  const F f;
  const V shift = hn::Set(f, maximum);
  V total[kSub];
  for (size_t s = 0; s < kSub; ++s) total[s] = hn::Zero(f);
  for (int i = 0; i < count; i += kBlockTokens) {
    BATON_UNROLL
    for (size_t s = 0; s < kSub; ++s) {
      float* at = scores + i + s * kLanes;
      const V p = exp_vector(hn::Sub(hn::LoadU(f, at), shift));
      hn::StoreU(p, f, at);
      total[s] = hn::Add(total[s], p);
    }
  }
  return sum_in_order(total);
}

// out = sum over tokens of p * v, divided by the sum of p; kVectors vectors of dimensions.
template <int kRows, int kVectors>
BATON_INLINE void value_pass(const AttentionCall& call, const Tile& tile, int dim,
                             const float* HWY_RESTRICT p, size_t stride, const float* inverse) {
  const F f;
  const int dims = call.cache->geometry().head_dim;
  const int shared_from = tile.first[kRows - 1];  // tokens that every row sees
  const int shared = tile.last[0] + 1;
  const int all = tile.last[kRows - 1] + 1;
  const int blocks = (all + kBlockTokens - 1) / kBlockTokens;
  V sum[kRows][kVectors];
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(f);
  }
  int token = tile.first_block * kBlockTokens;
  const int base = token;
  for (int b = tile.first_block; b < blocks; ++b) {
    const uint16_t* value = call.cache->value(call.layer, call.block_table[b], call.kv_head) + dim;
    const uint16_t* ahead =
        call.cache->value(call.layer, call.block_table[std::min(b + kAhead, blocks - 1)],
                          call.kv_head) +
        dim;
    const int end = std::min((b + 1) * kBlockTokens, all);
    // Tokens up to `to` for those rows that see them.
    const auto add_seen = [&](int to) HWY_ATTR {
      for (; token < to; ++token, value += dims, ahead += dims) {
        V row[kVectors];
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) row[v] = load_bf16(value + v * kLanes);
        BATON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          if (token < tile.first[r] || token > tile.last[r]) continue;
          const V weight = hn::Set(f, p[r * stride + token - base]);
          BATON_UNROLL
          for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, row[v], sum[r][v]);
        }
      }
    };
    const int shared_end = std::min(end, shared);
    add_seen(std::min(end, shared_from));
    for (; token < shared_end; ++token, value += dims, ahead += dims) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; v += kLine) __builtin_prefetch(ahead + v * kLanes, 0, 2);
      V row[kVectors];
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) row[v] = load_bf16(value + v * kLanes);
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(f, p[r * stride + token - base]);
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(weight, row[v], sum[r][v]);
      }
    }
    add_seen(end);
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(hn::Mul(sum[r][v], hn::Set(f, inverse[r])), f, tile.out[r] + dim + v * kLanes);
    }
  }
}

template <int kRows>
HWY_NOINLINE void attend(const AttentionCall& call, const Tile& tile, float* scratch,
                         size_t stride) {
  const int blocks = tile.last[kRows - 1] / kBlockTokens + 1;
  const int dims = call.cache->geometry().head_dim;
  float maximum[kRows], inverse[kRows];
  score_pass<kRows>(call, tile, blocks, scratch, stride, maximum);
  for (int r = 0; r < kRows; ++r) {
    inverse[r] = 1.0f / exp_pass(scratch + r * stride, (blocks - tile.first_block) * kBlockTokens,
                                 maximum[r]);
  }
  constexpr int kWide = kRows <= 4 ? 4 : 2;
  int dim = 0;
  for (; dim + kWide * static_cast<int>(kLanes) <= dims; dim += kWide * kLanes) {
    value_pass<kRows, kWide>(call, tile, dim, scratch, stride, inverse);
  }
  for (; dim < dims; dim += kLanes) {
    value_pass<kRows, 1>(call, tile, dim, scratch, stride, inverse);
  }
}

void paged(const AttentionCall& call, float* scratch) {
  const int dims = call.cache->geometry().head_dim;
  const int heads = std::min(call.group, kQueryTile);
  const int tokens = kQueryTile / heads;
  const int last_block = (call.position + call.tokens - 1) / kBlockTokens;
  const size_t stride = static_cast<size_t>(last_block + 1) * kBlockTokens;
  for (int t0 = 0; t0 < call.tokens; t0 += tokens) {
    for (int h0 = 0; h0 < call.group; h0 += heads) {
      Tile tile = {};
      int rows = 0;
      for (int t = t0; t < std::min(t0 + tokens, call.tokens); ++t) {
        for (int h = h0; h < std::min(h0 + heads, call.group); ++h, ++rows) {
          tile.q[rows] = call.q + t * call.q_stride + h * dims;
          tile.out[rows] = call.out + t * call.out_stride + h * dims;
          tile.last[rows] = call.position + t;
          tile.first[rows] = call.window > 0 ? std::max(0, tile.last[rows] + 1 - call.window) : 0;
        }
      }
      tile.first_block = tile.first[0] / kBlockTokens;
      switch (rows) {
        case 1:
          attend<1>(call, tile, scratch, stride);
          break;
        case 2:
          attend<2>(call, tile, scratch, stride);
          break;
        case 3:
          attend<3>(call, tile, scratch, stride);
          break;
        case 4:
          attend<4>(call, tile, scratch, stride);
          break;
        case 5:
          attend<5>(call, tile, scratch, stride);
          break;
        case 6:
          attend<6>(call, tile, scratch, stride);
          break;
        case 7:
          attend<7>(call, tile, scratch, stride);
          break;
        default:
          attend<8>(call, tile, scratch, stride);
          break;
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(paged);

void store_kv(const KvCache& cache, int layer, std::span<const uint32_t> block_table, int position,
              int tokens, const float* k, const float* v, size_t stride) {
  const KvGeometry& geometry = cache.geometry();
  for (int t = 0; t < tokens; ++t) {
    const int at = position + t;
    const uint32_t block = block_table[static_cast<size_t>(at / kBlockTokens)];
    const int slot = at % kBlockTokens;
    for (int head = 0; head < geometry.kv_heads; ++head) {
      const float* key = k + t * stride + head * geometry.head_dim;
      const float* value = v + t * stride + head * geometry.head_dim;
      uint16_t* key_out = cache.key(layer, block, head) + slot;
      uint16_t* value_out = cache.value(layer, block, head) + slot * geometry.head_dim;
      for (int d = 0; d < geometry.head_dim; ++d) {
        key_out[d * kBlockTokens] = bf16_from_float(key[d]);
        value_out[d] = bf16_from_float(value[d]);
      }
    }
  }
}

size_t attention_scratch_size(int max_context) {
  const size_t blocks = (static_cast<size_t>(max_context) + kBlockTokens - 1) / kBlockTokens;
  return size_t{kQueryTile} * blocks * kBlockTokens;
}

void paged_attention(const AttentionCall& call, float* scratch) {
  HWY_DYNAMIC_DISPATCH(paged)(call, scratch);
}

void reference_attention(const AttentionCall& call) {
  const int dims = call.cache->geometry().head_dim;
  for (int t = 0; t < call.tokens; ++t) {
    for (int h = 0; h < call.group; ++h) {
      const float* q = call.q + t * call.q_stride + h * dims;
      float* out = call.out + t * call.out_stride + h * dims;
      std::vector<double> p;
      const int first = call.window > 0 ? std::max(0, call.position + t + 1 - call.window) : 0;
      for (int at = first; at <= call.position + t; ++at) {
        const uint32_t block = call.block_table[static_cast<size_t>(at / kBlockTokens)];
        const uint16_t* key = call.cache->key(call.layer, block, call.kv_head) + at % kBlockTokens;
        double score = 0;
        for (int d = 0; d < dims; ++d) score += q[d] * float_from_bf16(key[d * kBlockTokens]);
        p.push_back(score);
      }
      const double maximum = *std::max_element(p.begin(), p.end());
      double sum = 0;
      for (double& x : p) sum += x = std::exp(x - maximum);
      for (int d = 0; d < dims; ++d) {
        double mix = 0;
        for (size_t i = 0; i < p.size(); ++i) {
          const size_t at = size_t(first) + i;
          const uint32_t block = call.block_table[at / kBlockTokens];
          const uint16_t* value = call.cache->value(call.layer, block, call.kv_head);
          mix += p[i] * float_from_bf16(value[(at % kBlockTokens) * dims + d]);
        }
        out[d] = static_cast<float>(mix / sum);
      }
    }
  }
}

}  // namespace baton::engine
#endif  // HWY_ONCE
