// What a training step computes between its products: softmax over causal attention, the
// classifier, the gradients of norms, of activation and of embeddings, and the gradient's norm.
// Sums of a row are sixteen side by side, added in order, as the CPU's.
#pragma once

#include "gpudirect/kernels/arguments.h"
#include "gpudirect/kernels/arithmetic-inl.h"
#include "gpudirect/kernels/elementwise-inl.h"

namespace baton::gpudirect::kernels {

inline constexpr uint32_t kRowLanes = 16;

// Of the sixteen of this thread's row, in order.
BATON_DEVICE float sum_of_lanes(const float* lanes, uint32_t thread) {
  float sum = 0;
  for (uint32_t lane = 0; lane < kRowLanes; ++lane) {
    sum = sum + lanes[thread / kRowLanes * kRowLanes + lane];
  }
  return sum;
}
BATON_DEVICE float largest_of_lanes(const float* lanes, uint32_t thread) {
  float most = lanes[thread / kRowLanes * kRowLanes];
  for (uint32_t lane = 1; lane < kRowLanes; ++lane) {
    most = larger(most, lanes[thread / kRowLanes * kRowLanes + lane]);
  }
  return most;
}

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
      lanes[thread] = sum;
    });
    block.each([&](uint32_t thread) {
      const uint32_t row = base + thread / kRowLanes;
      if (row >= a.rows) return;
      const uint64_t begin = uint64_t{row} * a.size;
      const float factor = block.load(a.factors + row);
      const float pull =
          sum_of_lanes(lanes, thread) * factor * factor * factor / static_cast<float>(a.size);
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
      parts[thread] = sum;
    });
    block.each([&](uint32_t thread) {
      if (thread >= kRowLanes || first + thread >= a.size) return;
      float sum = 0;
      for (uint32_t share = 0; share < kShares; ++share) {
        sum = sum + parts[share * kRowLanes + thread];
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
      most[thread] = largest;
    });
    each_row([&](uint32_t thread, const CausalRow& row) {
      const float largest = largest_of_lanes(most, thread);
      float sum = 0;
      for (uint32_t i = thread % kRowLanes; i < row.handled; i += kRowLanes) {
        const float score =
            i < row.seen ? block.load(a.scores + row.begin + i) * a.scaling : -1e30f;
        const float odds = exponential(score - largest);
        block.store(a.scores + row.begin + i, odds);
        sum = sum + odds;
      }
      sums[thread] = sum;
    });
    each_row([&](uint32_t thread, const CausalRow& row) {
      const float factor = 1.0f / sum_of_lanes(sums, thread);
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
      sums[thread] = sum;
    });
    block.each([&](uint32_t thread) {
      if (base + thread / kRowLanes >= rows) return;
      const CausalRow row = causal_row(base + thread / kRowLanes, a.length);
      const float sum = sum_of_lanes(sums, thread);
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

// A block for each row. `kStaged`: the row is kept in shared memory between its passes.
template <bool kStaged, class Block>
BATON_DEVICE void classify_row(Block& block, const Classifier& a, uint32_t row, float* staged,
                               float* most, float* sums) {
  float* const logits = a.logits + uint64_t{row} * a.size;
  auto* const vectors = reinterpret_cast<Vector16*>(logits);
  const auto value = [&](uint32_t i) { return kStaged ? staged[i] : block.load(logits + i); };
  block.each([&](uint32_t thread) {
    float largest = -INFINITY;
    for (uint32_t i = thread; i < a.size / 4; i += block.threads()) {
      const Vector16 four = block.load(vectors + i);
      for (uint32_t e = 0; e < 4; ++e) {
        if (kStaged) staged[4 * i + e] = float_of(four.word[e]);
        largest = larger(largest, float_of(four.word[e]));
      }
    }
    most[thread] = largest;
  });
  block.each([&](uint32_t thread) {
    if (thread >= kRowLanes) return;
    float largest = most[thread];
    for (uint32_t other = thread; other < block.threads(); other += kRowLanes) {
      largest = larger(largest, most[other]);
    }
    sums[thread] = largest;
  });
  block.each([&](uint32_t thread) {
    const float largest = largest_of_lanes(sums, 0);
    if (thread == 0) {
      block.store(a.margins + row, value(block.load(a.targets + row)) - largest);
    }
    most[thread] = largest;
  });
  block.each([&](uint32_t thread) {
    for (uint32_t i = thread; i < a.size; i += block.threads()) {
      const float odds = exponential(value(i) - most[thread]);
      if (kStaged) {
        staged[i] = odds;
      } else {
        block.store(logits + i, odds);
      }
    }
  });
  block.each([&](uint32_t thread) {
    if (thread >= kRowLanes) return;
    float sum = 0;
    BATON_UNROLL_BY_4
    for (uint32_t i = thread; i < a.size; i += kRowLanes) sum = sum + value(i);
    sums[thread] = sum;
  });
  block.each([&](uint32_t thread) {
    const float sum = sum_of_lanes(sums, 0);
    if (thread == 0) block.store(a.sums + row, sum);
    const float factor = a.scale / sum;
    const uint32_t target = block.load(a.targets + row);
    for (uint32_t i = thread; i < a.size / 4; i += block.threads()) {
      Vector16 four = {};
      if (!kStaged) four = block.load(vectors + i);
      for (uint32_t e = 0; e < 4; ++e) {
        const float odds = kStaged ? staged[4 * i + e] : float_of(four.word[e]);
        const float part = odds * factor;
        four.word[e] = bits_of(4 * i + e == target ? part - a.scale : part);
      }
      block.store(vectors + i, four);
    }
  });
}

template <class Block>
BATON_DEVICE void classifier(Block& block, const Classifier& a) {
  float* const staged = block.template shared<float, kClassifierRow>();
  float* const most = block.template shared<float, 256>();
  float* const sums = block.template shared<float, 257>();
  for (uint32_t row = block.index(); row < a.rows; row += block.blocks()) {
    if (a.size <= kClassifierRow) {
      classify_row<true>(block, a, row, staged, most, sums);
    } else {
      classify_row<false>(block, a, row, staged, most, sums);
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
      lanes[thread] = sum;
    });
    block.each([&](uint32_t thread) {
      if (thread >= at_once || base + thread >= all) return;
      double sum = 0;
      for (uint32_t lane = 0; lane < kLanes; ++lane) sum = sum + lanes[thread * kLanes + lane];
      block.store(a.squares + base + thread, sum);
    });
  }
}

}  // namespace baton::gpudirect::kernels
