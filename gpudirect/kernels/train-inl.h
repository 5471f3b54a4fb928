// The parts of a training step between its matrix products: softmax over causal attention, the
// classifier, the gradients of norms, of activation and of embeddings, and the gradient's norm.
// Sums of a row are sixteen side by side, added in order, as the CPU's.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/elementwise-inl.h"
#include "gpudirect/kernels/lanes-inl.h"

namespace baton::gpudirect::kernels {

// Where the lanes of this thread's row begin.
BATON_DEVICE uint32_t first_lane(uint32_t thread) { return thread / kRowLanes * kRowLanes; }

// Sixteen threads for a row.
template <class Block>
BATON_DEVICE void rms_norm_back(Block& block, const RmsNormBack& a) {
  const uint32_t at_once = block.threads() / kRowLanes;
  float* const lanes = block.template shared<float, 256>();
  for (uint32_t base = block.index() * at_once; base < a.rows; base += block.blocks() * at_once) {
    block.each([&](uint32_t thread) {
      const uint32_t row = base + thread / kRowLanes;
      if (row >= a.rows) return;
      const uint64_t begin = uint64_t{row} * a.size;
      float sum = 0;
      for (uint32_t i = thread % kRowLanes; i < a.size; i += kRowLanes) {
        const float weighted = block.load(a.weight + i) * block.load(a.dy + begin + i);
        sum = fmaf(weighted, block.load(a.x + begin + i), sum);
      }
      block.put(lanes + thread, sum);
    });
    block.each([&](uint32_t thread) {
      const uint32_t row = base + thread / kRowLanes;
      if (row >= a.rows) return;
      const uint64_t begin = uint64_t{row} * a.size;
      const float factor = block.load(a.factors + row);
      const float pull = sum_of_lanes(block, lanes + first_lane(thread)) * factor * factor *
                         factor / static_cast<float>(a.size);
      for (uint32_t i = thread % kRowLanes; i < a.size; i += kRowLanes) {
        const float own = block.load(a.dy + begin + i) * block.load(a.weight + i) * factor;
        const float change = fmaf(-block.load(a.x + begin + i), pull, own);
        const float before = a.fresh != 0 ? 0.0f : block.load(a.dx + begin + i);
        block.store(a.dx + begin + i, before + change);
      }
    });
  }
}

// A block has sixteen columns, and a thread one of the sixteen shares of their rows.
template <class Block>
BATON_DEVICE void rms_norm_weights(Block& block, const RmsNormWeights& a) {
  constexpr uint32_t kShares = 16;
  float* const parts = block.template shared<float, 256>();
  for (uint32_t first = block.index() * kRowLanes; first < a.size;
       first += block.blocks() * kRowLanes) {
    block.each([&](uint32_t thread) {
      const uint32_t share = thread / kRowLanes, column = first + thread % kRowLanes;
      if (column >= a.size) return;
      const auto end = static_cast<uint32_t>(uint64_t{share + 1} * a.rows / kShares);
      float sum = 0;
      for (auto row = static_cast<uint32_t>(uint64_t{share} * a.rows / kShares); row < end; ++row) {
        const uint64_t at = uint64_t{row} * a.size + column;
        sum = fmaf(block.load(a.x + at) * block.load(a.factors + row), block.load(a.dy + at), sum);
      }
      block.put(parts + thread, sum);
    });
    block.each([&](uint32_t thread) {
      if (thread >= kRowLanes || first + thread >= a.size) return;
      float sum = 0;
      for (uint32_t share = 0; share < kShares; ++share) {
        sum = sum + block.get(parts + share * kRowLanes + thread);
      }
      block.store(a.dw + first + thread, sum);
    });
  }
}

template <class Block>
BATON_DEVICE void rope_rows(Block& block, const RopeRows& a) {
  block.each([&](uint32_t thread) {
    const uint32_t half = a.head_dim / 2;
    const uint64_t pairs = uint64_t{a.rows} * a.heads * half;
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    for (uint64_t i = uint64_t{block.index()} * block.threads() + thread; i < pairs; i += step) {
      const auto pair = static_cast<uint32_t>(i % half);
      const uint64_t row = i / half / a.heads;
      float* const head = a.x + row * a.stride + i / half % a.heads * a.head_dim;
      const uint64_t angle = row % a.length * half + pair;
      rotate(block, head, pair, half, block.load(a.cos + angle),
             block.load(a.sin + angle) * a.direction, 1.0f);
    }
  });
}

// How many columns of a row are handled, and how many of those it sees.
struct CausalRow {
  uint64_t begin;
  uint32_t handled;
  uint32_t seen;
};
BATON_DEVICE CausalRow causal_row(uint64_t row, uint32_t length) {
  const auto at = static_cast<uint32_t>(row % length);
  return {row * length, smaller((at / kCausalRows + 1) * kCausalRows, length), at + 1};
}

// Sixteen threads for a row.
template <class Block>
BATON_DEVICE void causal_softmax(Block& block, const CausalSoftmax& a) {
  const uint32_t at_once = block.threads() / kRowLanes;
  const uint64_t rows = uint64_t{a.matrices} * a.length;
  float* const most = block.template shared<float, 256>();
  float* const sums = block.template shared<float, 257>();
  for (uint64_t base = uint64_t{block.index()} * at_once; base < rows;
       base += uint64_t{block.blocks()} * at_once) {
    const auto each_row = [&](const auto& function) {
      block.each([&](uint32_t thread) {
        const uint64_t row = base + thread / kRowLanes;
        if (row < rows) function(thread, causal_row(row, a.length));
      });
    };
    each_row([&](uint32_t thread, const CausalRow& row) {
      float largest = -INFINITY;
      for (uint32_t i = thread % kRowLanes; i < row.seen; i += kRowLanes) {
        largest = larger(largest, block.load(a.scores + row.begin + i) * a.scaling);
      }
      block.put(most + thread, largest);
    });
    each_row([&](uint32_t thread, const CausalRow& row) {
      const float largest = largest_of_lanes(block, most + first_lane(thread));
      float sum = 0;
      for (uint32_t i = thread % kRowLanes; i < row.handled; i += kRowLanes) {
        const float score =
            i < row.seen ? block.load(a.scores + row.begin + i) * a.scaling : -1e30f;
        const float odds = exponential(score - largest);
        block.store(a.scores + row.begin + i, odds);
        sum = sum + odds;
      }
      block.put(sums + thread, sum);
    });
    each_row([&](uint32_t thread, const CausalRow& row) {
      const float factor = 1.0f / sum_of_lanes(block, sums + first_lane(thread));
      for (uint32_t i = thread % kRowLanes; i < row.handled; i += kRowLanes) {
        float* const at = a.scores + row.begin + i;
        block.store(at, block.load(at) * factor);
      }
    });
  }
}

template <class Block>
BATON_DEVICE void causal_softmax_back(Block& block, const CausalSoftmaxBack& a) {
  const uint32_t at_once = block.threads() / kRowLanes;
  const uint64_t rows = uint64_t{a.matrices} * a.length;
  float* const sums = block.template shared<float, 256>();
  for (uint64_t base = uint64_t{block.index()} * at_once; base < rows;
       base += uint64_t{block.blocks()} * at_once) {
    block.each([&](uint32_t thread) {
      if (base + thread / kRowLanes >= rows) return;
      const CausalRow row = causal_row(base + thread / kRowLanes, a.length);
      float sum = 0;
      for (uint32_t i = thread % kRowLanes; i < row.handled; i += kRowLanes) {
        sum = fmaf(block.load(a.weights + row.begin + i), block.load(a.gradients + row.begin + i),
                   sum);
      }
      block.put(sums + thread, sum);
    });
    block.each([&](uint32_t thread) {
      if (base + thread / kRowLanes >= rows) return;
      const CausalRow row = causal_row(base + thread / kRowLanes, a.length);
      const float sum = sum_of_lanes(block, sums + first_lane(thread));
      for (uint32_t i = thread % kRowLanes; i < row.handled; i += kRowLanes) {
        float* const at = a.gradients + row.begin + i;
        const float own = block.load(a.weights + row.begin + i) * (block.load(at) - sum);
        block.store(at, own * a.scaling);
      }
    });
  }
}

template <class Block>
BATON_DEVICE void swiglu_back(Block& block, const SwiGluBack& a) {
  block.each([&](uint32_t thread) {
    const uint64_t step = uint64_t{block.blocks()} * block.threads();
    const uint64_t all = uint64_t{a.rows} * a.size;
    for (uint64_t i = uint64_t{block.index()} * block.threads() + thread; i < all; i += step) {
      const uint64_t at = i / a.size * 2 * a.size + i % a.size;
      const float gate = block.load(a.gate_up + at), up = block.load(a.gate_up + at + a.size);
      const float d = block.load(a.d_out + i);
      const float sigmoid = 1.0f / (1.0f + exponential(-gate));
      const float silu = gate * sigmoid;
      const float slope = sigmoid * fmaf(gate, 1.0f - sigmoid, 1.0f);
      block.store(a.d_gate_up + at, d * up * slope);
      block.store(a.d_gate_up + at + a.size, d * silu);
    }
  });
}

// A row of logits that a block handles, and what it keeps of it in shared memory.
struct LogitsRow {
  float* logits;
  uint32_t size;
  uint32_t number;
  uint32_t target;
};
struct ClassifierMemory {
  float* stage;  // [kClassifierRow]: logits, then their odds
  float* most;   // [256]: of what each thread has, then the sums of the lanes
  float* lanes;  // [kRowLanes + 1]: the largest of theirs; the target's logit
};

BATON_DEVICE float largest_of(const Vector16& four, float largest) {
  BATON_UNROLL for (uint32_t e = 0; e < 4; ++e) largest = larger(largest, float_of(four.word[e]));
  return largest;
}
BATON_DEVICE Vector16 odds_of(Vector16 four, float largest) {
  BATON_UNROLL for (uint32_t e = 0; e < 4; ++e) {
    four.word[e] = bits_of(exponential(float_of(four.word[e]) - largest));
  }
  return four;
}

BATON_DEVICE Vector16 multiplied(Vector16 four, float by) {
  BATON_UNROLL for (uint32_t e = 0; e < 4; ++e) {
    four.word[e] = bits_of(float_of(four.word[e]) * by);
  }
  return four;
}

// Reduces the threads' results to sixteen, followed by the target's logit.
template <class Block, class Target>
BATON_DEVICE void find_largest(Block& block, const ClassifierMemory& memory, const Target& target) {
  block.each([&](uint32_t thread) {
    if (thread == 32) block.put(memory.lanes + kRowLanes, target());
    if (thread >= kRowLanes) return;
    float largest = block.get(memory.most + thread);
    BATON_UNROLL for (uint32_t other = kRowLanes; other < block.threads(); other += kRowLanes) {
      largest = larger(largest, block.get(memory.most + thread + other));
    }
    block.put(memory.lanes + thread, largest);
  });
}
template <class Block>
BATON_DEVICE void store_margin(Block& block, const Classifier& a, const LogitsRow& row,
                               const ClassifierMemory& memory) {
  block.store(a.margins + row.number,
              block.get(memory.lanes + kRowLanes) - largest_of_lanes(block, memory.lanes));
}
// Adds the odds of `length` staged logits to what the lanes have so far.
template <class Block>
BATON_DEVICE void add_odds(Block& block, const ClassifierMemory& memory, uint32_t length,
                           bool first) {
  block.each([&](uint32_t thread) {
    if (thread >= kRowLanes) return;
    float* const sum = memory.most + thread;
    block.put(sum, add_lane(
                       block, memory.stage + thread, length / kRowLanes,
                       [](float before, float odds) { return before + odds; },
                       first ? 0.0f : block.get(sum)));
  });
}
// Behind all others of the thread that stored the target's gradient too.
template <class Block>
BATON_DEVICE void store_target(Block& block, const Classifier& a, const LogitsRow& row,
                               uint32_t thread) {
  if (row.target / 4 % block.threads() != thread) return;
  float* const at = row.logits + row.target;
  block.store(at, block.load(at) - a.scale);
}

// A row that is read once: the next one is, while this one is handled.
template <class Block, class HeldOfThreads>
BATON_DEVICE void classify_held(Block& block, const Classifier& a, const LogitsRow& row,
                                const ClassifierMemory& memory, HeldOfThreads& held) {
  auto* const stage = reinterpret_cast<Vector16*>(memory.stage);
  const auto each_vector = [&](uint32_t thread, const auto& function) {
    BATON_UNROLL for (uint32_t j = 0; j < kHeld; ++j) {
      const uint32_t i = thread + j * block.threads();
      if (i < row.size / 4) function(i, j);
    }
  };
  block.each([&](uint32_t thread) {
    float largest = -INFINITY;
    each_vector(thread, [&](uint32_t i, uint32_t j) {
      block.put(stage + i, held[thread].of[j]);
      largest = largest_of(held[thread].of[j], largest);
    });
    block.put(memory.most + thread, largest);
    if (row.number + block.blocks() >= a.rows) return;
    const float* const next = row.logits + uint64_t{block.blocks()} * row.size;
    each_vector(thread, [&](uint32_t i, uint32_t j) {
      held[thread].of[j] = load_four(block, next + 4 * i);
    });
  });
  find_largest(block, memory, [&] { return block.get(memory.stage + row.target); });
  block.each([&](uint32_t thread) {
    const float largest = largest_of_lanes(block, memory.lanes);
    if (thread == 0) store_margin(block, a, row, memory);
    each_vector(thread, [&](uint32_t i, uint32_t) {
      block.put(stage + i, odds_of(block.get(stage + i), largest));
    });
  });
  add_odds(block, memory, row.size, true);
  block.each([&](uint32_t thread) {
    const float sum = sum_of_lanes(block, memory.most);
    if (thread == 0) block.store(a.sums + row.number, sum);
    const float factor = a.scale / sum;
    each_vector(thread, [&](uint32_t i, uint32_t) {
      store_four(block, row.logits + 4 * i, multiplied(block.get(stage + i), factor));
    });
    store_target(block, a, row, thread);
  });
}

// A longer one, which is read three times; its odds are there piece by piece.
template <class Block>
BATON_DEVICE void classify_long(Block& block, const Classifier& a, const LogitsRow& row,
                                const ClassifierMemory& memory) {
  auto* const stage = reinterpret_cast<Vector16*>(memory.stage);
  const auto load = [&](uint32_t i) { return load_four(block, row.logits + 4 * i); };
  block.each([&](uint32_t thread) {
    float largest = -INFINITY;
    BATON_UNROLL_BY_4
    for (uint32_t i = thread; i < row.size / 4; i += block.threads()) {
      largest = largest_of(load(i), largest);
    }
    block.put(memory.most + thread, largest);
  });
  find_largest(block, memory, [&] { return block.load(row.logits + row.target); });
  for (uint32_t begin = 0; begin < row.size; begin += kClassifierRow) {
    const uint32_t length = smaller(kClassifierRow, row.size - begin);
    block.each([&](uint32_t thread) {
      const float largest = largest_of_lanes(block, memory.lanes);
      BATON_UNROLL_BY_4
      for (uint32_t i = thread; i < length / 4; i += block.threads()) {
        block.put(stage + i, odds_of(load(begin / 4 + i), largest));
      }
    });
    add_odds(block, memory, length, begin == 0);
  }
  block.each([&](uint32_t thread) {
    const float largest = largest_of_lanes(block, memory.lanes);
    const float sum = sum_of_lanes(block, memory.most);
    if (thread == 0) {
      store_margin(block, a, row, memory);
      block.store(a.sums + row.number, sum);
    }
    const float factor = a.scale / sum;
    BATON_UNROLL_BY_4
    for (uint32_t i = thread; i < row.size / 4; i += block.threads()) {
      store_four(block, row.logits + 4 * i, multiplied(odds_of(load(i), largest), factor));
    }
    store_target(block, a, row, thread);
  });
}

// A block for each row.
template <class Block>
BATON_DEVICE void classifier(Block& block, const Classifier& a) {
  static_assert(kClassifierRow == kHeldRow);
  const ClassifierMemory memory = {
      reinterpret_cast<float*>(block.template shared<Vector16, kClassifierRow / 4>()),
      block.template shared<float, 256>(), block.template shared<float, kRowLanes + 1>()};
  auto held = block.template per_thread<Held>();
  const bool short_rows = a.size <= kClassifierRow;
  if (short_rows && block.index() < a.rows) {
    const float* const logits = a.logits + uint64_t{block.index()} * a.size;
    block.each_warp([&](uint32_t thread) {
      BATON_UNROLL for (uint32_t j = 0; j < kHeld; ++j) {
        const uint32_t i = thread + j * block.threads();
        if (i < a.size / 4) held[thread].of[j] = load_four(block, logits + 4 * i);
      }
    });
  }
  for (uint32_t number = block.index(); number < a.rows; number += block.blocks()) {
    const LogitsRow row = {a.logits + uint64_t{number} * a.size, a.size, number,
                           block.load(a.targets + number)};
    if (short_rows) {
      classify_held(block, a, row, memory, held);
    } else {
      classify_long(block, a, row, memory);
    }
  }
}

// A block for each row of the table.
template <class Block>
BATON_DEVICE void add_rows(Block& block, const AddRows& a) {
  block.each([&](uint32_t thread) {
    for (uint32_t row = block.index(); row < a.count; row += block.blocks()) {
      const uint32_t begin = block.load(a.begins + row), end = block.load(a.begins + row + 1);
      if (begin == end && a.fresh == 0) continue;
      for (uint32_t i = thread; i < a.size; i += block.threads()) {
        float* const at = a.table + uint64_t{row} * a.size + i;
        float sum = a.fresh != 0 ? 0.0f : block.load(at);
        for (uint32_t j = begin; j < end; ++j) {
          sum = sum + block.load(a.from + uint64_t{block.load(a.order + j)} * a.size + i);
        }
        block.store(at, sum);
      }
    }
  });
}

// Eight threads for each of the blocks.
template <class Block>
BATON_DEVICE void sum_squares(Block& block, const SumSquares& a) {
  constexpr uint32_t kLanes = 8;
  const uint32_t at_once = block.threads() / kLanes;
  const uint64_t all = (a.count + kSquaresBlock - 1) / kSquaresBlock;
  auto* const lanes = block.template shared<double, 256>();
  for (uint64_t base = uint64_t{block.index()} * at_once; base < all;
       base += uint64_t{block.blocks()} * at_once) {
    block.each([&](uint32_t thread) {
      const uint64_t begin = (base + thread / kLanes) * kSquaresBlock;
      const uint64_t end = smaller(a.count, begin + kSquaresBlock);
      double sum = 0;
      for (uint64_t i = begin + thread % kLanes; i < end; i += kLanes) {
        const auto value = static_cast<double>(block.load(a.values + i) / a.divisor);
        sum = sum + value * value;
      }
      block.put(lanes + thread, sum);
    });
    block.each([&](uint32_t thread) {
      if (thread >= at_once || base + thread >= all) return;
      double sum = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        sum = sum + block.get(lanes + thread * kLanes + lane);
      block.store(a.squares + base + thread, sum);
    });
  }
}

}  // namespace baton::gpudirect::kernels
