// Paged attention: tiles of up to 12 queries share every load of K and V.
#include "engine/kernels/attention.h"

#include <algorithm>
#include <cmath>

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
// Elements of V that are dealt to two vectors whatever their width.
constexpr int kTwo = 2 * static_cast<int>(kLanes);
constexpr int kMaxDims = 256;
constexpr int kSplitBlocks = kSplitTokens / kBlockTokens;
// Elements of a cache line.
constexpr int kLine = 64 / sizeof(uint16_t);
// How far ahead every line is asked for, into L2: blocks lie anywhere, so that the processor
// foresees little.
constexpr int kAheadElements = 3072;

template <int kVectors>
BATON_INLINE void load_unit(const uint16_t* from, V (&to)[kVectors]) {
  if constexpr (kVectors == 1) {
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
template <int kVectors>
BATON_INLINE void store_unit(const V (&from)[kVectors], float* to) {
  if constexpr (kVectors == 1) {
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
  int rows;

  int first_block() const { return first[0] / kBlockTokens; }
  int end_block() const { return last[rows - 1] / kBlockTokens + 1; }
  bool sees(int row, int split) const {
    return split >= first[row] / kSplitTokens && split <= last[row] / kSplitTokens;
  }
  // Positions that every row sees, [shared_from, shared_to): none if it ends before it begins.
  int shared_from() const { return first[rows - 1]; }
  int shared_to() const { return last[0] + 1; }
};

// The blocks of one split that a tile sees, and what is asked for while one is read: the block
// `distance` behind it. Behind the last keys come the first values, and behind the last values the
// first keys of the next split.
struct Places {
  const uint16_t* key[kSplitBlocks];
  const uint16_t* value[kSplitBlocks];
  const uint16_t* next_key[kSplitBlocks];
  int first, count;  // blocks
  int block_elements, distance;

  Places(const AttentionCall& call, const Tile& tile, int split) {
    const int begin = split * kSplitBlocks, end = tile.end_block();
    first = std::max(begin, tile.first_block());
    count = std::min(begin + kSplitBlocks, end) - first;
    block_elements = call.cache->geometry().head_dim * kBlockTokens;
    distance = kAheadElements / block_elements;
    for (int b = 0; b < count; ++b) {
      key[b] = call.cache->key(call.layer, call.block_table[size_t(first + b)], call.kv_head);
      value[b] = key[b] + block_elements;
    }
    for (int b = 0; b < count; ++b) {
      const int next = std::min(first + count + b, end - 1);
      next_key[b] = call.cache->key(call.layer, call.block_table[size_t(next)], call.kv_head);
    }
  }
  const uint16_t* behind_key(int b) const {
    const int next = b + distance;
    return next < count ? key[next] : value[std::min(next - count, count - 1)];
  }
  const uint16_t* behind_value(int b) const {
    const int next = b + distance;
    return next < count ? value[next] : next_key[std::min(next - count, count - 1)];
  }
  // Asks for the first keys at once: nothing knew of them before.
  void ask_for_first_keys() const {
    for (int b = 0; b < std::min(count, distance); ++b) {
      for (int i = 0; i < block_elements; i += kLine) __builtin_prefetch(key[b] + i, 0, 2);
    }
  }
};

// The lines of V that the last keys did not ask for, one after the other.
class ValueLines {
 public:
  explicit ValueLines(Places& places) : places_(places), block_(places.distance) { begin(); }
  void ask() {
    if (line_ == nullptr) return;
    __builtin_prefetch(line_, 0, 2);
    line_ += kLine;
    if (line_ != end_) return;
    ++block_;
    begin();
  }
  // Lines that were prefetched need not be prefetched again.
  ~ValueLines() { places_.distance = std::max(places_.distance, std::min(block_, places_.count)); }
  ValueLines(const ValueLines&) = delete;
  ValueLines& operator=(const ValueLines&) = delete;

 private:
  void begin() {
    line_ = block_ < places_.count ? places_.value[block_] : nullptr;
    end_ = line_ == nullptr ? nullptr : line_ + places_.block_elements;
  }
  Places& places_;
  int block_;
  const uint16_t* line_;
  const uint16_t* end_;
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
                             int slot, float* HWY_RESTRICT to, V* best) {
  const F f;
  V sum[kRows][kPair];
  dot_unit<kRows, kAsks>(q + row, key, dims, ahead, sum);
  if (slot < tile.shared_from() || slot + kUnit > tile.shared_to()) {
    const V lowest = hn::Set(f, -HUGE_VALF);
    BATON_UNROLL
    for (int v = 0; v < kPair; ++v) {
      const V position = hn::MulAdd(hn::Iota(f, 0.0f), hn::Set(f, static_cast<float>(kPair)),
                                    hn::Set(f, static_cast<float>(slot + v)));
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V first = hn::Set(f, static_cast<float>(tile.first[row + r]));
        const V last = hn::Set(f, static_cast<float>(tile.last[row + r]));
        const auto seen = hn::And(hn::Ge(position, first), hn::Le(position, last));
        sum[r][v] = hn::IfThenElse(seen, sum[r][v], lowest);
      }
    }
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int v = 0; v < kPair; ++v) best[row + r] = hn::Max(best[row + r], sum[r][v]);
    store_unit(sum[r], to + (row + r) * kSplitTokens);
  }
}

// For each row: the largest score and the sum of exponentials of the splits so far; the factors
// for the result before a split, and for the split's own.
template <int kRows>
struct Parts {
  float most[kRows], total[kRows];
  float keep[kRows], add[kRows];
};

// The passes over a split are functions of their own: constants of the one would take the registers
// of the other.

// scores[row][16 * (block - first) + slot] = q . k, and the largest of each row.
template <int kRows>
HWY_NOINLINE void score_split(const Tile& tile, const Places& places, const float* HWY_RESTRICT q,
                              int dims, float* HWY_RESTRICT scores, float* most) {
  const F f;
  constexpr int kFirst = kRows <= kRowsAtOnce ? kRows : (kRows + 1) / 2;
  V best[kRows];
  for (int r = 0; r < kRows; ++r) best[r] = hn::Set(f, -HUGE_VALF);
  for (int b = 0; b < places.count; ++b) {
    const uint16_t* ahead = places.behind_key(b);
    for (int lane = 0; lane < kBlockTokens; lane += kUnit) {
      const int slot = (places.first + b) * kBlockTokens + lane;
      float* to = scores + b * kBlockTokens + lane;
      score_unit<kFirst, true>(tile, 0, q, places.key[b] + lane, dims, ahead, slot, to, best);
      if constexpr (kFirst < kRows) {
        score_unit<kRows - kFirst, false>(tile, kFirst, q, places.key[b] + lane, dims, ahead, slot,
                                          to, best);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) most[r] = hn::GetLane(hn::MaxOfLanes(f, best[r]));
}

// scores = exp(scores - maximum) in place; `total` becomes their sums in 16 lanes. Asks for a line
// of V for every 16 scores: memory would have nothing to do meanwhile.
BATON_INLINE void exp_pass(float* HWY_RESTRICT scores, int count, float maximum, ValueLines& lines,
                           float* HWY_RESTRICT total) {
  const F f;
  const V shift = hn::Set(f, maximum);
  V sum[kSub];
  for (size_t s = 0; s < kSub; ++s) sum[s] = hn::Zero(f);
  for (int i = 0; i < count; i += kBlockTokens) {
    lines.ask();
    BATON_UNROLL
    for (size_t s = 0; s < kSub; ++s) {
      float* at = scores + i + s * kLanes;
      const V p = exp_vector(hn::Sub(hn::LoadU(f, at), shift));
      hn::StoreU(p, f, at);
      sum[s] = hn::Add(sum[s], p);
    }
  }
  for (size_t s = 0; s < kSub; ++s) hn::Store(sum[s], f, total + s * kLanes);
}

BATON_INLINE float exp_of(float x) { return hn::GetLane(exp_vector(hn::Set(F(), x))); }

// Scores of a split to exponentials, and how it is added to those before it.
template <int kRows>
HWY_NOINLINE void weigh_split(const Tile& tile, int split, Places& places, const float* most,
                              float* HWY_RESTRICT scores, Parts<kRows>& parts) {
  HWY_ALIGN float totals[kRows * kBlockTokens] = {};
  ValueLines lines(places);
  for (int r = 0; r < kRows; ++r) {
    if (!tile.sees(r, split)) continue;
    exp_pass(scores + r * kSplitTokens, places.count * kBlockTokens, most[r], lines,
             totals + r * kBlockTokens);
  }
  // Each row sums in the order of lanes, all rows side by side, so none waits for its own sum.
  float sums[kRows] = {};
  for (int lane = 0; lane < kBlockTokens; ++lane) {
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] += totals[r * kBlockTokens + lane];
  }
  for (int r = 0; r < kRows; ++r) {
    if (!tile.sees(r, split)) continue;
    // One of the two exponentials is that of 0.
    const bool higher = most[r] > parts.most[r];
    const float less =
        parts.most[r] == -HUGE_VALF ? 0.0f : exp_of(-std::fabs(most[r] - parts.most[r]));
    parts.keep[r] = higher ? less : 1.0f;
    parts.add[r] = higher ? 1.0f : less;
    parts.total[r] = std::fma(parts.add[r], sums[r], parts.keep[r] * parts.total[r]);
    parts.most[r] = std::max(parts.most[r], most[r]);
  }
}

// Blocks of V one after the other, from token `from` of the first to before token `to`, counted
// from that block's first; and what is asked for meanwhile.
struct Run {
  const uint16_t* const* value;
  const uint16_t* const* ahead;
  int from, to;
};

// sum[row][dim] += p[row][token] * value[token][dim] for the tokens of a run, kRows rows and kUnits
// units of kVectors vectors of dimensions, `value` elements behind a token's first: the sums stay
// in registers meanwhile. Where they lie, units are as load_unit() deals them.
template <int kRows, int kUnits, int kVectors, bool kAsks>
BATON_INLINE void mix_units(const float* HWY_RESTRICT p, const Run& run, int dims, int dim,
                            float* HWY_RESTRICT sums) {
  const F f;
  constexpr int kSize = kVectors * static_cast<int>(kLanes);
  V sum[kRows][kUnits][kVectors];
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        sum[r][u][v] = hn::Load(f, sums + r * dims + dim + u * kSize + v * kLanes);
      }
    }
  }
  for (int low = run.from, b = 0; low < run.to; ++b) {
    const int high = std::min((b + 1) * kBlockTokens, run.to);
    const uint16_t* HWY_RESTRICT value =
        run.value[b] + static_cast<size_t>(low - b * kBlockTokens) * dims + dim;
    const uint16_t* ahead = kAsks ? run.ahead[b] + dim * kBlockTokens : nullptr;
    for (; low < high; ++low, value += dims) {
      if constexpr (kAsks) {
        // The same part of the block ahead, which these tokens go through once.
        BATON_UNROLL
        for (int at = 0; at < kUnits * kSize; at += kLine) __builtin_prefetch(ahead + at, 0, 2);
        ahead += kUnits * kSize;
      }
      V row[kUnits][kVectors];
      BATON_UNROLL
      for (int u = 0; u < kUnits; ++u) load_unit(value + u * kSize, row[u]);
      // A weight is used at once: twelve of them would push sums out of the registers.
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const V weight = hn::Set(f, p[r * kSplitTokens + low]);
        BATON_UNROLL
        for (int u = 0; u < kUnits; ++u) {
          BATON_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            sum[r][u][v] = hn::MulAdd(weight, row[u][v], sum[r][u][v]);
          }
        }
      }
    }
  }
  BATON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    BATON_UNROLL
    for (int u = 0; u < kUnits; ++u) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        hn::Store(sum[r][u][v], f, sums + r * dims + dim + u * kSize + v * kLanes);
      }
    }
  }
}

// The same for all dimensions, in pairs of vectors as long as there are two.
template <int kRows, bool kAsks>
BATON_INLINE void mix(const float* p, const Run& run, int dims, float* sums) {
  // Chains enough to cover the latency of two multiply-add units, where there are dimensions
  // enough.
  constexpr int kUnits = kPair == 1 ? (kRows <= 4 ? 2 : 1) : (kRows == 1 ? 4 : kRows <= 3 ? 2 : 1);
  int dim = 0;
  for (; dim + kUnits * kTwo <= dims; dim += kUnits * kTwo) {
    mix_units<kRows, kUnits, 2, kAsks>(p, run, dims, dim, sums);
  }
  if constexpr (kUnits > 1) {
    for (; dim + kTwo <= dims; dim += kTwo) {
      mix_units<kRows, 1, 2, kAsks>(p, run, dims, dim, sums);
    }
  }
  if constexpr (kPair == 1) {
    if (dim < dims) mix_units<kRows, 1, 1, kAsks>(p, run, dims, dim, sums);
  }
}

// sums = over the tokens of a split that a row sees, in their order, p * v. Blocks are taken
// `at_once` at a time: V is read in the order in which it lies if that is one.
template <int kRows>
HWY_NOINLINE void value_split(const Tile& tile, const Places& places, int dims, int at_once,
                              const float* HWY_RESTRICT p, float* HWY_RESTRICT sums) {
  constexpr int kFirst = kRows <= kRowsAtOnce ? kRows : (kRows + 1) / 2;
  std::fill_n(sums, kRows * dims, 0.0f);
  const uint16_t* ahead[kSplitBlocks];
  for (int b = 0; b < places.count; ++b) ahead[b] = places.behind_value(b);
  for (int b = 0; b < places.count; b += at_once) {
    const int begin = (places.first + b) * kBlockTokens;
    const int end = begin + std::min(at_once, places.count - b) * kBlockTokens;
    const float* weights = p + b * kBlockTokens;
    const auto run = [&](int low, int high) {
      const int skipped = (low - begin) / kBlockTokens;
      return Run{places.value + b + skipped, ahead + b + skipped,
                 low - begin - skipped * kBlockTokens, high - begin - skipped * kBlockTokens};
    };
    const auto weights_of = [&](int row, int low) {
      return weights + row * kSplitTokens + (low - begin) / kBlockTokens * kBlockTokens;
    };
    const auto add_seen = [&](int low, int high) HWY_ATTR {
      for (int r = 0; r < kRows; ++r) {
        const int from = std::max(low, tile.first[r]), to = std::min(high, tile.last[r] + 1);
        if (from >= to) continue;
        mix<1, false>(weights_of(r, from), run(from, to), dims, sums + r * dims);
      }
    };
    const int from = std::clamp(tile.shared_from(), begin, end);
    const int to = std::max(from, std::min(tile.shared_to(), end));
    if (from > begin) add_seen(begin, from);
    if (from < to) {
      mix<kFirst, true>(weights_of(0, from), run(from, to), dims, sums);
      if constexpr (kFirst < kRows) {
        mix<kRows - kFirst, false>(weights_of(kFirst, from), run(from, to), dims,
                                   sums + kFirst * dims);
      }
    }
    if (to < end) add_seen(to, end);
  }
}

// The result of the splits before this one and of it, for the rows that see some of it.
template <int kRows>
BATON_INLINE void add_split(const Tile& tile, int split, int dims, const Parts<kRows>& parts,
                            const float* HWY_RESTRICT sums, float* HWY_RESTRICT mixed) {
  const F f;
  for (int r = 0; r < kRows; ++r) {
    if (!tile.sees(r, split)) continue;
    const V keep = hn::Set(f, parts.keep[r]), add = hn::Set(f, parts.add[r]);
    for (int at = r * dims; at < (r + 1) * dims; at += static_cast<int>(kLanes)) {
      hn::Store(hn::MulAdd(add, hn::Load(f, sums + at), hn::Mul(keep, hn::Load(f, mixed + at))), f,
                mixed + at);
    }
  }
}

template <int kRows>
HWY_NOINLINE void attend(const AttentionCall& call, const Tile& tile, float* scratch) {
  const F f;
  const int dims = call.cache->geometry().head_dim;
  // Single tokens wait for memory, which likes to be read in order; prompts for the registers.
  const int at_once = call.tokens == 1 ? 1 : kSplitBlocks;
  HWY_ALIGN float q[kMaxDims * kQueryTile];
  HWY_ALIGN float sums[kRows * kMaxDims];
  HWY_ALIGN float mixed[kRows * kMaxDims];
  float most[kRows];
  Parts<kRows> parts = {};
  // By way of rows that lie together: GCC has no registers for twelve addresses.
  for (int r = 0; r < kRows; ++r) std::copy_n(tile.q[r], dims, sums + r * kMaxDims);
  for (int d = 0; d < dims; ++d) {
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) q[d * kQueryTile + r] = sums[r * kMaxDims + d];
  }
  std::fill_n(mixed, kRows * dims, 0.0f);
  for (int r = 0; r < kRows; ++r) {
    parts.most[r] = -HUGE_VALF;
  }
  const int first = tile.first_block() / kSplitBlocks, last = (tile.end_block() - 1) / kSplitBlocks;
  for (int split = first; split <= last; ++split) {
    Places places(call, tile, split);
    if (split == first) places.ask_for_first_keys();
    score_split<kRows>(tile, places, q, dims, scratch, most);
    weigh_split<kRows>(tile, split, places, most, scratch, parts);
    value_split<kRows>(tile, places, dims, at_once, scratch, sums);
    add_split<kRows>(tile, split, dims, parts, sums, mixed);
  }
  for (int r = 0; r < kRows; ++r) {
    const V inverse = hn::Set(f, 1.0f / parts.total[r]);
    const float* from = mixed + r * dims;
    int dim = 0;
    for (; dim + kTwo <= dims; dim += kTwo) {
      const V part[2] = {hn::Mul(hn::Load(f, from + dim), inverse),
                         hn::Mul(hn::Load(f, from + dim + kLanes), inverse)};
      store_unit(part, tile.out[r] + dim);
    }
    if (dim < dims) hn::StoreU(hn::Mul(hn::Load(f, from + dim), inverse), f, tile.out[r] + dim);
  }
}

// attend<rows>(), of at most kMost.
template <int kMost>
void attend_rows(const AttentionCall& call, const Tile& tile, float* scratch) {
  if constexpr (kMost > 1) {
    if (tile.rows < kMost) return attend_rows<kMost - 1>(call, tile, scratch);
  }
  attend<kMost>(call, tile, scratch);
}

void paged(const AttentionCall& call, float* scratch) {
  const int dims = call.cache->geometry().head_dim;
  const int heads = std::min(call.group, kTileRows);
  const int tokens = kTileRows / heads;
  for (int t0 = 0; t0 < call.tokens; t0 += tokens) {
    for (int h0 = 0; h0 < call.group; h0 += heads) {
      Tile tile = {};
      for (int t = t0; t < std::min(t0 + tokens, call.tokens); ++t) {
        for (int h = h0; h < std::min(h0 + heads, call.group); ++h) {
          const int row = tile.rows++;
          tile.q[row] = call.q + t * call.q_stride + h * dims;
          tile.out[row] = call.out + t * call.out_stride + h * dims;
          tile.last[row] = call.position + t;
          tile.first[row] = call.window > 0 ? std::max(0, tile.last[row] + 1 - call.window) : 0;
        }
      }
      // The queries of the next tokens are asked for now, that no lane waits for them then.
      for (int t = t0 + tokens; t < std::min(t0 + 2 * tokens, call.tokens); ++t) {
        const float* q = call.q + t * call.q_stride + h0 * dims;
        for (int i = 0; i < std::min(heads, call.group - h0) * dims; i += kLine / 2) {
          __builtin_prefetch(q + i, 0, 2);
        }
      }
      attend_rows<kTileRows>(call, tile, scratch);
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

void paged_attention(const AttentionCall& call, float* scratch) {
  HWY_DYNAMIC_DISPATCH(paged)(call, scratch);
}

}  // namespace baton::engine
#endif  // HWY_ONCE
