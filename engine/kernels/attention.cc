// Paged attention: tiles of up to 12 queries share every load of K and V.
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

// A unit is what one load of bf16 gives: 16 fixed lanes in one vector, or two narrower vectors, of
// its even and of its odd elements. Dealing a pair of elements to two vectors takes a shift and a
// mask; widening them in place would take two shuffles more. Every element keeps its own chain.
constexpr int kPair = kLanes == 16 ? 1 : 2;
constexpr int kUnit = kPair * static_cast<int>(kLanes);
// Rows whose sums fit into the registers, with both of a pair's vectors: 16 registers hold four. A
// tile has no more than twice as many.
constexpr int kRowsAtOnce = kPair == 1 ? kQueryTile : 4;
constexpr int kTileRows = kPair == 1 ? kQueryTile : 2 * kRowsAtOnce;
constexpr int kMaxDims = 256;
constexpr int kSplitBlocks = kSplitTokens / kBlockTokens;
// Elements of a cache line.
constexpr int kLine = 64 / sizeof(uint16_t);
// How far ahead every line is asked for, into L2: blocks lie anywhere, so that the processor
// foresees little.
constexpr int kAheadElements = 3072;

BATON_INLINE void load_unit(const uint16_t* from, V (&to)[kPair]) {
  if constexpr (kPair == 1) {
    to[0] = load_bf16(from);
  } else {
    const F f;
    const hn::RebindToUnsigned<F> u;
    const auto both = hn::LoadU(u, reinterpret_cast<const uint32_t*>(from));
    to[0] = hn::BitCast(f, hn::ShiftLeft<16>(both));
    to[1] = hn::BitCast(f, hn::And(both, hn::Set(u, 0xffff0000)));
  }
}

// In the order of the elements.
BATON_INLINE void store_unit(const V (&from)[kPair], float* to) {
  if constexpr (kPair == 1) {
    hn::StoreU(from[0], F(), to);
  } else {
    hn::StoreInterleaved2(from[0], from[1], F(), to);
  }
}

// Up to kTileRows queries (token, head) with a common KV head.
struct Tile {
  const float* q[kQueryTile];
  float* out[kQueryTile];
  int first[kQueryTile];  // first position the query sees; ascending
  int last[kQueryTile];   // last position the query sees; ascending
  int first_block;
};

// Where the block lies that is read `distance` blocks behind `b`: behind the last keys come the
// first values, and behind the last values nothing that is known here.
struct Ahead {
  const AttentionCall& call;
  int first, end, block_elements, distance;

  Ahead(const AttentionCall& of, int first_block, int blocks)
      : call(of),
        first(first_block),
        end(blocks),
        block_elements(of.cache->geometry().head_dim * kBlockTokens),
        distance(kAheadElements / block_elements) {}
  uint32_t at(int b) const { return call.block_table[static_cast<size_t>(std::min(b, end - 1))]; }
  const uint16_t* of_key(int b) const {
    const int next = b + distance;
    return next < end ? call.cache->key(call.layer, at(next), call.kv_head)
                      : call.cache->value(call.layer, at(first + next - end), call.kv_head);
  }
  const uint16_t* of_value(int b) const {
    return call.cache->value(call.layer, at(b + distance), call.kv_head);
  }
  // Asks for the first keys at once: nobody knew of them before.
  void ask_for_first_keys() const {
    for (int b = first; b < std::min(end, first + distance); ++b) {
      const uint16_t* key = call.cache->key(call.layer, at(b), call.kv_head);
      for (int i = 0; i < block_elements; i += kLine) __builtin_prefetch(key + i, 0, 2);
    }
  }
  // Line `n` of V behind those that the last keys asked for.
  const uint16_t* value_line(int n) const {
    const int lines = block_elements / kLine;
    return of_value(first + n / lines) + n % lines * kLine;
  }
  // So many of these lines have been asked for.
  void add_lines(int lines) { distance += lines * kLine / block_elements; }
};

// q . k of kRows queries and the keys of one unit. Two chains a row, of even and of odd dimensions;
// q is [dims][kQueryTile]. Asks for one line of `ahead` for every two dimensions.
template <int kRows, bool kAsks>
BATON_INLINE void dot_unit(const float* HWY_RESTRICT q, const uint16_t* HWY_RESTRICT key, int dims,
                           const uint16_t* ahead, V (&sum)[kRows][kPair]) {
  const F f;
  // The chains of four rows in pairs are too many for 16 registers: first the even dimensions of
  // all, then the odd ones, of keys that are in L1.
  constexpr bool kTogether = kPair == 1 || kRows <= 3;
  V odd[kRows][kPair];
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kPair; ++v) sum[r][v] = odd[r][v] = hn::Zero(f);
  }
  const auto add = [&](int d, V(&to)[kRows][kPair]) HWY_ATTR {
    V k[kPair];
    load_unit(key + d * kBlockTokens, k);
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const V factor = hn::Set(f, q[d * kQueryTile + r]);
      BATON_UNROLL
      for (int v = 0; v < kPair; ++v) to[r][v] = hn::MulAdd(factor, k[v], to[r][v]);
    }
  };
  if constexpr (kTogether) {
    for (int d = 0; d < dims; d += 2) {
      if constexpr (kAsks) __builtin_prefetch(ahead + d * kBlockTokens, 0, 2);
      add(d, sum);
      add(d + 1, odd);
    }
  } else {
    for (int d = 0; d < dims; d += 2) {
      if constexpr (kAsks) __builtin_prefetch(ahead + d * kBlockTokens, 0, 2);
      add(d, sum);
    }
    for (int d = 1; d < dims; d += 2) add(d, odd);
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kPair; ++v) sum[r][v] = hn::Add(sum[r][v], odd[r][v]);
  }
}

// Scores of rows [row, row + kRows) and one unit of keys, from position `slot` on, into `to`:
// -inf where the row does not see the slot.
template <int kRows, bool kAsks>
BATON_INLINE void score_unit(const Tile& tile, int row, const float* HWY_RESTRICT q,
                             const uint16_t* HWY_RESTRICT key, int dims, const uint16_t* ahead,
                             int slot, float* HWY_RESTRICT to, size_t stride, V* best) {
  const F f;
  const V lowest = hn::Set(f, -HUGE_VALF);
  V sum[kRows][kPair];
  dot_unit<kRows, kAsks>(q + row, key, dims, ahead, sum);
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int first = tile.first[row + r], last = tile.last[row + r];
    const bool whole = slot >= first && slot + kUnit <= last + 1;
    BATON_UNROLL
    for (int v = 0; v < kPair; ++v) {
      if (!whole) {
        const V position = hn::MulAdd(hn::Iota(f, 0.0f), hn::Set(f, static_cast<float>(kPair)),
                                      hn::Set(f, static_cast<float>(slot + v)));
        const auto seen = hn::And(hn::Ge(position, hn::Set(f, static_cast<float>(first))),
                                  hn::Le(position, hn::Set(f, static_cast<float>(last))));
        sum[r][v] = hn::IfThenElse(seen, sum[r][v], lowest);
      }
      best[row + r] = hn::Max(best[row + r], sum[r][v]);
    }
    store_unit(sum[r], to + static_cast<size_t>(row + r) * stride);
  }
}

// Of one row and split: its largest score and the sum of its exponentials; then what the result of
// the splits before it is multiplied with, and its own.
struct Part {
  float most, sum;
  float keep, add;
};
// The parts of a tile: of split `first` of its first row, then of its second; then of the next.
struct Parts {
  Part* of;
  int first;
  int rows;
  Part& at(int split, int row) const { return of[(split - first) * rows + row]; }
};

// scores[row][16 * (block - first_block) + slot] = q . k, and the largest of each split.
template <int kRows>
BATON_INLINE void score_pass(const AttentionCall& call, const Tile& tile, int blocks,
                             float* HWY_RESTRICT scores, size_t stride, const Parts& parts) {
  const F f;
  constexpr int kFirst = kRows <= kRowsAtOnce ? kRows : (kRows + 1) / 2;
  const int dims = call.cache->geometry().head_dim;
  HWY_ALIGN float q[kMaxDims * kQueryTile];
  for (int d = 0; d < dims; ++d) {
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) q[d * kQueryTile + r] = tile.q[r][d];
  }
  V best[kRows];
  for (int r = 0; r < kRows; ++r) best[r] = hn::Set(f, -HUGE_VALF);
  const Ahead ahead(call, tile.first_block, blocks);
  ahead.ask_for_first_keys();
  for (int b = tile.first_block; b < blocks; ++b) {
    const uint16_t* key = call.cache->key(call.layer, call.block_table[b], call.kv_head);
    const uint16_t* next = ahead.of_key(b);
    for (int lane = 0; lane < kBlockTokens; lane += kUnit) {
      const int slot = b * kBlockTokens + lane;
      float* to = scores + slot - tile.first_block * kBlockTokens;
      score_unit<kFirst, true>(tile, 0, q, key + lane, dims, next, slot, to, stride, best);
      if constexpr (kFirst < kRows) {
        score_unit<kRows - kFirst, false>(tile, kFirst, q, key + lane, dims, next, slot, to, stride,
                                          best);
      }
    }
    if ((b + 1) % kSplitBlocks != 0 && b + 1 < blocks) continue;
    for (int r = 0; r < kRows; ++r) {
      parts.at(b / kSplitBlocks, r).most = hn::GetLane(hn::MaxOfLanes(f, best[r]));
      best[r] = hn::Set(f, -HUGE_VALF);
    }
  }
}

// scores = exp(scores - maximum) in place; returns their sum. Asks for a line of V from `line` on
// for every 16 scores: memory would have nothing to do meanwhile.
BATON_INLINE float exp_pass(float* HWY_RESTRICT scores, int count, float maximum,
                            const Ahead& ahead, int line) {
  const F f;
  const V shift = hn::Set(f, maximum);
  V total[kSub];
  for (size_t s = 0; s < kSub; ++s) total[s] = hn::Zero(f);
  for (int i = 0; i < count; i += kBlockTokens) {
    __builtin_prefetch(ahead.value_line(line++), 0, 2);
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

BATON_INLINE float exp_of(float x) { return hn::GetLane(exp_vector(hn::Set(F(), x))); }

// A row's scores to exponentials, split by split, and how the splits are added. Returns the inverse
// of the sum of all.
BATON_INLINE float weigh_row(float* HWY_RESTRICT scores, const Tile& tile, int row, int blocks,
                             const Parts& parts, const Ahead& ahead, int line) {
  float most = -HUGE_VALF, total = 0;
  const int last = tile.last[row] / kSplitTokens;
  for (int split = tile.first[row] / kSplitTokens; split <= last; ++split) {
    const int from = std::max(split * kSplitBlocks, tile.first_block) - tile.first_block;
    const int to = std::min((split + 1) * kSplitBlocks, blocks) - tile.first_block;
    Part& part = parts.at(split, row);
    part.sum = exp_pass(scores + from * kBlockTokens, (to - from) * kBlockTokens, part.most, ahead,
                        line + from);
    // One of the two exponentials is that of 0.
    const bool higher = part.most > most;
    const float less = most == -HUGE_VALF ? 0.0f : exp_of(-std::fabs(part.most - most));
    part.keep = higher ? less : 1.0f;
    part.add = higher ? 1.0f : less;
    total = std::fma(part.add, part.sum, part.keep * total);
    most = std::max(most, part.most);
  }
  return 1.0f / total;
}

// sum[row][dim] += p[row][token] * value[token][dim] for `tokens` tokens of one block, kRows rows
// and kUnits units of dimensions. Where sums lie, units are in pairs as load_unit() deals them.
template <int kRows, int kUnits, bool kAsks>
BATON_INLINE void mix_units(const float* HWY_RESTRICT p, size_t stride,
                            const uint16_t* HWY_RESTRICT value, int dims, int tokens,
                            const uint16_t* ahead, float* HWY_RESTRICT sums) {
  const F f;
  V sum[kRows][kUnits][kPair];
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      BATON_UNROLL
      for (int v = 0; v < kPair; ++v) {
        sum[r][u][v] = hn::Load(f, sums + r * kMaxDims + u * kUnit + v * kLanes);
      }
    }
  }
  for (int token = 0; token < tokens; ++token) {
    if constexpr (kAsks) {
      // The same part of the block ahead, which these tokens go through once.
      BATON_UNROLL
      for (int at = 0; at < kUnits * kUnit; at += kLine) {
        __builtin_prefetch(ahead + token * kUnits * kUnit + at, 0, 2);
      }
    }
    BATON_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      V row[kPair];
      load_unit(value + u * kUnit, row);
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(f, p[static_cast<size_t>(r) * stride + token]);
        BATON_UNROLL
        for (int v = 0; v < kPair; ++v) {
          sum[r][u][v] = hn::MulAdd(weight, row[v], sum[r][u][v]);
        }
      }
    }
    value += dims;
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      BATON_UNROLL
      for (int v = 0; v < kPair; ++v) {
        hn::Store(sum[r][u][v], f, sums + r * kMaxDims + u * kUnit + v * kLanes);
      }
    }
  }
}

// The same for all dimensions: so V is read once, in the order in which it lies.
template <int kRows, bool kAsks>
BATON_INLINE void mix(const float* p, size_t stride, const uint16_t* value, int dims, int tokens,
                      const uint16_t* ahead, float* sums) {
  // Chains enough to cover the latency of two multiply-add units, where there are dimensions
  // enough.
  constexpr int kUnits = kPair == 1 ? (kRows <= 4 ? 4 : 2) : (kRows == 1 ? 4 : kRows <= 3 ? 2 : 1);
  int dim = 0;
  for (; dim + kUnits * kUnit <= dims; dim += kUnits * kUnit) {
    mix_units<kRows, kUnits, kAsks>(p, stride, value + dim, dims, tokens,
                                    ahead + dim * kBlockTokens, sums + dim);
  }
  if constexpr (kUnits > 1) {
    for (; dim < dims; dim += kUnit) {
      mix_units<kRows, 1, kAsks>(p, stride, value + dim, dims, tokens, ahead + dim * kBlockTokens,
                                 sums + dim);
    }
  }
}

// The result of the splits before this one and of it, for the rows that see some of it; then its
// sums begin anew.
template <int kRows>
BATON_INLINE void add_split(const Tile& tile, int split, int dims, const Parts& parts,
                            float* HWY_RESTRICT sums, float* HWY_RESTRICT mixed) {
  const F f;
  for (int r = 0; r < kRows; ++r) {
    if (split < tile.first[r] / kSplitTokens || split > tile.last[r] / kSplitTokens) continue;
    const Part& part = parts.at(split, r);
    const V keep = hn::Set(f, part.keep), add = hn::Set(f, part.add);
    for (int at = r * kMaxDims; at < r * kMaxDims + dims; at += static_cast<int>(kLanes)) {
      hn::Store(hn::MulAdd(add, hn::Load(f, sums + at), hn::Mul(keep, hn::Load(f, mixed + at))), f,
                mixed + at);
      hn::Store(hn::Zero(f), f, sums + at);
    }
  }
}

// out = for each split the sum over its tokens of p * v, in their order; all splits added.
template <int kRows>
BATON_INLINE void value_pass(const AttentionCall& call, const Tile& tile, int blocks,
                             const float* HWY_RESTRICT p, size_t stride, const Parts& parts,
                             const float* inverse, const Ahead& ahead) {
  const F f;
  constexpr int kFirst = kRows <= kRowsAtOnce ? kRows : (kRows + 1) / 2;
  const int dims = call.cache->geometry().head_dim;
  HWY_ALIGN float sums[kRows * kMaxDims];
  HWY_ALIGN float mixed[kRows * kMaxDims];
  for (int r = 0; r < kRows; ++r) {
    std::fill_n(sums + r * kMaxDims, dims, 0.0f);
    std::fill_n(mixed + r * kMaxDims, dims, 0.0f);
  }
  // Tokens that every row sees.
  const int shared_from = tile.first[kRows - 1], shared_to = tile.last[0] + 1;
  for (int b = tile.first_block; b < blocks; ++b) {
    const int begin = b * kBlockTokens, end = begin + kBlockTokens;
    const uint16_t* value = call.cache->value(call.layer, call.block_table[b], call.kv_head);
    const uint16_t* next = ahead.of_value(b);
    const float* weights = p + begin - tile.first_block * kBlockTokens;
    const int from = std::clamp(shared_from, begin, end);
    const int to = std::max(from, std::min(shared_to, end));
    const auto add_seen = [&](int low, int high) HWY_ATTR {
      for (int r = 0; r < kRows; ++r) {
        const int first = std::max(low, tile.first[r]);
        const int some = std::min(high, tile.last[r] + 1) - first;
        if (some <= 0) continue;
        mix<1, false>(weights + r * stride + first - begin, stride, value + (first - begin) * dims,
                      dims, some, next, sums + r * kMaxDims);
      }
    };
    if (from > begin) add_seen(begin, from);
    mix<kFirst, true>(weights + from - begin, stride, value + (from - begin) * dims, dims,
                      to - from, next, sums);
    if constexpr (kFirst < kRows) {
      mix<kRows - kFirst, false>(weights + kFirst * stride + from - begin, stride,
                                 value + (from - begin) * dims, dims, to - from, next,
                                 sums + kFirst * kMaxDims);
    }
    if (to < end) add_seen(to, end);
    if ((b + 1) % kSplitBlocks == 0 || b + 1 == blocks) {
      add_split<kRows>(tile, b / kSplitBlocks, dims, parts, sums, mixed);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int dim = 0; dim < dims; dim += kUnit) {
      V part[kPair];
      BATON_UNROLL
      for (int v = 0; v < kPair; ++v) {
        part[v] =
            hn::Mul(hn::Load(f, mixed + r * kMaxDims + dim + v * kLanes), hn::Set(f, inverse[r]));
      }
      store_unit(part, tile.out[r] + dim);
    }
  }
}

template <int kRows>
HWY_NOINLINE void attend(const AttentionCall& call, const Tile& tile, float* scratch,
                         size_t stride) {
  const int blocks = tile.last[kRows - 1] / kBlockTokens + 1, some = blocks - tile.first_block;
  const Parts parts = {reinterpret_cast<Part*>(scratch + kRows * stride),
                       tile.first_block / kSplitBlocks, kRows};
  float inverse[kRows];
  score_pass<kRows>(call, tile, blocks, scratch, stride, parts);
  Ahead ahead(call, tile.first_block, blocks);
  for (int r = 0; r < kRows; ++r) {
    inverse[r] = weigh_row(scratch + r * stride, tile, r, blocks, parts, ahead, r * some);
  }
  ahead.add_lines(kRows * some);
  value_pass<kRows>(call, tile, blocks, scratch, stride, parts, inverse, ahead);
}

// attend<rows>(), of at most kMost.
template <int kMost>
void attend_rows(int rows, const AttentionCall& call, const Tile& tile, float* scratch,
                 size_t stride) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return attend_rows<kMost - 1>(rows, call, tile, scratch, stride);
  }
  attend<kMost>(call, tile, scratch, stride);
}

void paged(const AttentionCall& call, float* scratch) {
  const int dims = call.cache->geometry().head_dim;
  const int heads = std::min(call.group, kTileRows);
  const int tokens = kTileRows / heads;
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
      attend_rows<kTileRows>(rows, call, tile, scratch, stride);
    }
  }
}

void round_row(const float* from, int dims, uint16_t* to) {
  const hn::Rebind<uint16_t, F> half;
  int d = 0;
  for (; d + static_cast<int>(kLanes) <= dims; d += static_cast<int>(kLanes)) {
    hn::StoreU(hn::TruncateTo(half, round_to_bf16(hn::LoadU(F(), from + d))), half, to + d);
  }
  for (; d < dims; ++d) to[d] = bf16_from_float(from[d]);
}

// K and V of one head and some tokens of one block, from `slot` on.
void store_head(const float* k, const float* v, size_t stride, int dims, int slot, int tokens,
                uint16_t* key, uint16_t* value) {
  uint16_t rows[kBlockTokens][kMaxDims];
  for (int t = 0; t < tokens; ++t) {
    round_row(k + static_cast<size_t>(t) * stride, dims, rows[t]);
    round_row(v + static_cast<size_t>(t) * stride, dims, value + (slot + t) * dims);
  }
  for (int d = 0; d < dims; ++d) {
    for (int t = 0; t < tokens; ++t) key[d * kBlockTokens + slot + t] = rows[t][d];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace baton::engine
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace baton::engine {

HWY_EXPORT(paged);
HWY_EXPORT(store_head);

void store_kv(const KvCache& cache, int layer, std::span<const uint32_t> block_table, int position,
              int tokens, const float* k, const float* v, size_t stride) {
  const KvGeometry& geometry = cache.geometry();
  int some = 0;
  for (int t = 0; t < tokens; t += some) {
    const int slot = (position + t) % kBlockTokens;
    some = std::min(kBlockTokens - slot, tokens - t);
    const uint32_t block = block_table[static_cast<size_t>((position + t) / kBlockTokens)];
    for (int head = 0; head < geometry.kv_heads; ++head) {
      const size_t from = static_cast<size_t>(t) * stride + size_t(head) * geometry.head_dim;
      HWY_DYNAMIC_DISPATCH(store_head)
      (k + from, v + from, stride, geometry.head_dim, slot, some, cache.key(layer, block, head),
       cache.value(layer, block, head));
    }
  }
}

size_t attention_scratch_size(int max_context) {
  const size_t blocks = (static_cast<size_t>(max_context) + kBlockTokens - 1) / kBlockTokens;
  const size_t splits = (static_cast<size_t>(max_context) + kSplitTokens - 1) / kSplitTokens;
  constexpr size_t kPartFloats = 4;  // of each row and split
  return size_t{kQueryTile} * (blocks * kBlockTokens + splits * kPartFloats);
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
