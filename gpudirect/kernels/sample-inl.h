// Draws a token for each row of logits: the one that the engine's Sampler draws.
//
// The Sampler sorts by logit, then by token, and walks along the sums of the weights. Here the
// place in that order is found by the digits of the logits, and weights are added in any order. So
// sums differ in their last places; where that could matter, the answer is kUndecided.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"

namespace baton::gpudirect::kernels {

// In the order of the logits, -0 as +0; 0: NaN, which is never chosen.
BATON_DEVICE uint32_t key_of_logit(float logit) {
  const uint32_t bits = bits_of(logit + 0.0f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
BATON_DEVICE float logit_of_key(uint32_t key) {
  return float_of((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
inline constexpr uint32_t kKeyOfMinusInfinity = 0x007fffffu;
inline constexpr uint32_t kKeyOfInfinity = 0xff800000u;

// A place in the sorted list: among the tokens of one logit.
struct SortedPlace {
  double above;    // the weights before them
  uint32_t count;  // tokens before them
  uint32_t key;    // of their logit
  uint32_t ties;   // how many they are
  uint32_t found;  // 0: the end was reached
};

struct SampleMemory {
  double* weights;           // [256]
  unsigned* counts;          // [256]
  unsigned long long* best;  // [256]
  SortedPlace* places;       // [2]: the one that was found last, and the next
};

// A row of logits, and how its weights are computed.
struct LogitRow {
  const float* logits;
  uint32_t size;
  double temperature;
  double best;
};
BATON_DEVICE double weight_of(const LogitRow& row, uint32_t key) {
  return exp((static_cast<double>(logit_of_key(key)) - row.best) / row.temperature);
}

// The largest logit and, of several, the lowest token: (key, ~token).
template <class Block>
BATON_DEVICE unsigned long long best_of(Block& block, const LogitRow& row,
                                        const SampleMemory& memory) {
  block.each([&](uint32_t thread) {
    unsigned long long best = 0;
    for (uint32_t i = thread; i < row.size; i += block.threads()) {
      const uint32_t key = key_of_logit(block.load(row.logits + i));
      if (key != 0)
        best = larger(best, static_cast<unsigned long long>(key) << 32 | (~i & 0xffffffffu));
    }
    block.put(memory.best + thread, best);
  });
  for (uint32_t half = block.threads() / 2; half > 0; half /= 2) {
    block.each([&](uint32_t thread) {
      if (thread < half) {
        block.put(memory.best + thread,
                  larger(block.get(memory.best + thread), block.get(memory.best + thread + half)));
      }
    });
  }
  return block.get(memory.best);
}

// All weights, and how many tokens have one.
template <class Block>
BATON_DEVICE void add_all(Block& block, const LogitRow& row, const SampleMemory& memory) {
  block.each([&](uint32_t thread) {
    double sum = 0;
    unsigned count = 0;
    for (uint32_t i = thread; i < row.size; i += block.threads()) {
      const uint32_t key = key_of_logit(block.load(row.logits + i));
      if (key == 0) continue;
      sum = sum + weight_of(row, key);
      ++count;
    }
    block.put(memory.weights + thread, sum);
    block.put(memory.counts + thread, count);
  });
  for (uint32_t half = block.threads() / 2; half > 0; half /= 2) {
    block.each([&](uint32_t thread) {
      if (thread < half) {
        block.put(memory.weights + thread,
                  block.get(memory.weights + thread) + block.get(memory.weights + thread + half));
        block.put(memory.counts + thread,
                  block.get(memory.counts + thread) + block.get(memory.counts + thread + half));
      }
    });
  }
}

// Weights and counts by the next eight bits of the key, of those whose upper bits are known.
template <class Block>
BATON_DEVICE void histogram(Block& block, const LogitRow& row, const SampleMemory& memory,
                            const SortedPlace* place, uint32_t shift) {
  block.each([&](uint32_t thread) {
    block.put(memory.weights + thread, 0.0);
    block.put(memory.counts + thread, 0u);
  });
  block.each([&](uint32_t thread) {
    const uint32_t known = block.get(place).key;
    for (uint32_t i = thread; i < row.size; i += block.threads()) {
      const uint32_t key = key_of_logit(block.load(row.logits + i));
      if (key == 0 || (shift < 24 && key >> (shift + 8) != known >> (shift + 8))) continue;
      block.add(memory.counts + (key >> shift & 0xffu), 1u);
      block.add(memory.weights + (key >> shift & 0xffu), weight_of(row, key));
    }
  });
}

// Where in the histogram that is, and what was before it.
template <class Block>
BATON_DEVICE void next_digit(Block& block, const SampleMemory& memory, uint32_t count,
                             double weight, uint32_t shift, SortedPlace& at) {
  int bin = 255;
  for (; bin >= 0; --bin) {
    const unsigned own_count = block.get(memory.counts + bin);
    const double own_weight = block.get(memory.weights + bin);
    if (at.count + own_count > count || at.above + own_weight > weight) break;
    at.count += own_count;
    at.above += own_weight;
  }
  at.found = bin >= 0 ? 1 : 0;
  if (bin < 0) return;
  at.key |= static_cast<uint32_t>(bin) << shift;
  at.ties = block.get(memory.counts + bin);
}

// Finds the place from which the list, likeliest first, has more than `count` tokens or weighs more
// than `weight`.
template <class Block>
BATON_DEVICE SortedPlace find_place(Block& block, const LogitRow& row, const SampleMemory& memory,
                                    uint32_t count, double weight) {
  block.each([&](uint32_t thread) {
    if (thread == 0) block.put(memory.places, {0, 0, 0, 0, 1});
  });
  for (uint32_t digit = 0; digit < 4; ++digit) {
    const SortedPlace* const before = memory.places + digit % 2;
    const uint32_t shift = 24 - 8 * digit;
    histogram(block, row, memory, before, shift);
    block.each([&](uint32_t thread) {
      if (thread != 0) return;
      SortedPlace at = block.get(before);
      if (at.found != 0) next_digit(block, memory, count, weight, shift, at);
      block.put(memory.places + (digit + 1) % 2, at);
    });
  }
  const SortedPlace found = block.get(memory.places);
  block.each([](uint32_t) {});  // all have read it before it is written again
  return found;
}

// The token that is number `number` among those of this key.
template <class Block>
BATON_DEVICE void store_tie(Block& block, const LogitRow& row, const SampleMemory& memory,
                            uint32_t key, uint32_t number, int32_t* to) {
  const uint32_t share = pieces_of(row.size, block.threads());
  const auto each_tie = [&](uint32_t thread, const auto& function) {
    for (uint32_t i = thread * share; i < smaller((thread + 1) * share, row.size); ++i) {
      if (key_of_logit(block.load(row.logits + i)) == key) function(i);
    }
  };
  block.each([&](uint32_t thread) {
    unsigned count = 0;
    each_tie(thread, [&](uint32_t) { ++count; });
    block.put(memory.counts + thread, count);
  });
  block.each([&](uint32_t thread) {
    uint32_t before = 0;
    for (uint32_t other = 0; other < thread; ++other) before += block.get(memory.counts + other);
    if (number < before || number >= before + block.get(memory.counts + thread)) return;
    each_tie(thread, [&](uint32_t token) {
      if (before++ == number) block.store(to, static_cast<int32_t>(token));
    });
  });
}

// Draws among the weights of the row whose sum is `total`. `slack`: what a sum may be off by.
template <class Block>
BATON_DEVICE void draw(Block& block, const LogitRow& row, const SampleMemory& memory,
                       const SampleRow& how, double total, double slack, int32_t* to) {
  const auto undecided = [&] {
    block.each([&](uint32_t thread) {
      if (thread == 0) block.store(to, kUndecided);
    });
  };
  const auto near = [&](double a, double b) { return fabs(a - b) <= slack; };
  if (how.top_p < 1) {  // the shortest list that weighs enough
    const double goal = how.top_p * total;
    const SortedPlace cut = find_place(block, row, memory, ~0u, goal);
    if (cut.found == 0) return undecided();
    const double each = weight_of(row, cut.key);
    const double more = larger(1.0, ceil((goal - cut.above) / each));
    const double sum = cut.above + more * each;
    if (near(sum, goal) || near(sum - each, goal)) return undecided();
    total = sum;
  }
  const double left = how.uniform * total;
  const SortedPlace place = find_place(block, row, memory, ~0u, left);
  if (place.found == 0) return undecided();
  const double each = weight_of(row, place.key);
  const double number = floor((left - place.above) / each);
  const bool first = place.count == 0 && number == 0;
  if (!(number >= 0 && number < place.ties) ||
      (!first && near(left, place.above + number * each)) ||
      near(left, place.above + (number + 1) * each) || near(left, total)) {
    return undecided();
  }
  store_tie(block, row, memory, place.key, static_cast<uint32_t>(number), to);
}

template <class Block>
BATON_DEVICE void sample(Block& block, const Sample& a) {
  const SampleMemory memory = {
      block.template shared<double, 256>(), block.template shared<unsigned, 256>(),
      block.template shared<unsigned long long, 256>(), block.template shared<SortedPlace, 2>()};
  for (uint32_t index = block.index(); index < a.row_count; index += block.blocks()) {
    const SampleRow how = block.load(a.rows + index);
    LogitRow row = {a.logits + uint64_t{index} * a.vocabulary, a.vocabulary, how.temperature, 0};
    const unsigned long long best = best_of(block, row, memory);
    const auto key = static_cast<uint32_t>(best >> 32);
    const bool drawn = how.temperature > 0;
    // Without a finite logit there is nothing to draw by; the greedy choice is then token 0.
    if (!drawn || key <= kKeyOfMinusInfinity || key >= kKeyOfInfinity) {
      const bool none = key == 0 || (!drawn && key == kKeyOfMinusInfinity);
      block.each([&](uint32_t thread) {
        const uint32_t token = none ? 0 : ~static_cast<uint32_t>(best);
        if (thread == 0) block.store(a.tokens + index, static_cast<int32_t>(token));
      });
      continue;
    }
    row.best = logit_of_key(key);
    add_all(block, row, memory);
    double total = block.get(memory.weights);
    const unsigned candidates = block.get(memory.counts);
    block.each([](uint32_t) {});
    const double slack = total * (candidates + 16.0) * 8 * 0x1p-53;
    if (how.top_k > 0 && how.top_k < candidates) {
      const SortedPlace last = find_place(block, row, memory, how.top_k - 1, INFINITY);
      total = last.above + (how.top_k - last.count) * weight_of(row, last.key);
    }
    draw(block, row, memory, how, total, slack, a.tokens + index);
  }
}

}  // namespace baton::gpudirect::kernels
