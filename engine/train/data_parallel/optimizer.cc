// AdamW's update, piece by piece and range by range in blocks of fixed size.
#include "engine/train/data_parallel/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace baton::engine::train {
namespace {

constexpr size_t kTask = 16384;  // elements that one thread updates at a time

// Eight sums side by side: a fixed order, and one that vectorises.
double block_squares(const float* gradients, size_t count, float divisor) {
  constexpr size_t kLanes = 8;
  double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double g = gradients[i + lane] / divisor;
      lanes[lane] += g * g;
    }
  }
  for (; i < count; ++i) {
    const double g = gradients[i] / divisor;
    lanes[i % kLanes] += g * g;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

float learning_rate(const OptimizerOptions& options, int step) {
  if (step < options.warmup_steps) {
    return options.learning_rate * static_cast<float>(step + 1) /
           static_cast<float>(options.warmup_steps);
  }
  const double way = static_cast<double>(step - options.warmup_steps) /
                     std::max(1, options.steps - options.warmup_steps);
  const double wave = 0.5 + 0.5 * std::cos(std::numbers::pi * std::min(1.0, way));
  return options.learning_rate *
         static_cast<float>(options.final_share + (1.0 - options.final_share) * wave);
}

float norm_of(std::span<const double> squares) {
  double total = 0;
  for (double sum : squares) total += sum;
  return static_cast<float>(std::sqrt(total));
}

AdamW::AdamW(const ParameterMap& map, const OptimizerOptions& options,
             std::vector<FlatRange> pieces, ComputePool& pool)
    : map_(map), options_(options), pieces_(std::move(pieces)), pool_(pool) {
  size_t owned = 0;
  for (const FlatRange& piece : pieces_) {
    places_.push_back(owned);
    owned += piece.size();
  }
  first_ = AlignedArray<float>(owned);
  second_ = AlignedArray<float>(owned);
}

void AdamW::sum_squares(size_t piece, const float* gradients, float divisor,
                        double* squares) const {
  const FlatRange range{pieces_[piece].begin, std::min(pieces_[piece].end, map_.size)};
  if (range.begin >= range.end) return;  // nothing but padding
  const size_t first = range.begin / kNormBlock;
  const auto count = static_cast<int64_t>((range.size() + kNormBlock - 1) / kNormBlock);
  pool_.parallel_for(count, [&](int64_t block, int) {
    const size_t begin = range.begin + static_cast<size_t>(block) * kNormBlock;
    squares[first + static_cast<size_t>(block)] =
        block_squares(gradients + begin, std::min(kNormBlock, range.end - begin), divisor);
  });
}

void AdamW::update(size_t piece, int step, float norm, float divisor, float* parameters,
                   const float* gradients) {
  const float factor = norm > options_.clip ? options_.clip / norm : 1.0f;
  const float rate = learning_rate(options_, step);
  const float correct1 = 1.0f - std::pow(options_.beta1, static_cast<float>(step + 1));
  const float correct2 = 1.0f - std::pow(options_.beta2, static_cast<float>(step + 1));
  const float b1 = options_.beta1, b2 = options_.beta2;
  float* first = first_.data() + places_[piece];
  float* second = second_.data() + places_[piece];
  const size_t piece_begin = pieces_[piece].begin;
  for (const ParameterRange& range : map_.ranges()) {
    const size_t from = std::max(range.offset, piece_begin);
    const size_t to = std::min(range.end(), pieces_[piece].end);
    if (from >= to) continue;
    const float decay = range.decays ? 1.0f - rate * options_.weight_decay : 1.0f;
    const auto tasks = static_cast<int64_t>((to - from + kTask - 1) / kTask);
    pool_.parallel_for(tasks, [&](int64_t task, int) {
      const size_t begin = from + static_cast<size_t>(task) * kTask;
      const size_t end = std::min(to, begin + kTask);
      for (size_t i = begin; i < end; ++i) {
        const float g = gradients[i] / divisor * factor;
        const size_t place = i - piece_begin;
        const float m = first[place] = b1 * first[place] + (1.0f - b1) * g;
        const float v = second[place] = b2 * second[place] + (1.0f - b2) * g * g;
        const float step_size = (m / correct1) / (std::sqrt(v / correct2) + options_.epsilon);
        parameters[i] = parameters[i] * decay - rate * step_size;
      }
    });
  }
}

}  // namespace baton::engine::train
