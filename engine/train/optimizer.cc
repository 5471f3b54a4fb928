// The update, range by range in blocks of fixed size.
#include "engine/train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace baton {
namespace {
constexpr size_t kBlock = 16384;
}  // namespace

AdamW::AdamW(const ParameterMap& map, const OptimizerOptions& options, ComputePool& pool)
    : map_(map), options_(options), pool_(pool), first_(map.size), second_(map.size) {}

float AdamW::learning_rate(int step) const {
  if (step < options_.warmup_steps) {
    return options_.learning_rate * static_cast<float>(step + 1) /
           static_cast<float>(options_.warmup_steps);
  }
  const double way = static_cast<double>(step - options_.warmup_steps) /
                     std::max(1, options_.steps - options_.warmup_steps);
  const double wave = 0.5 + 0.5 * std::cos(std::numbers::pi * std::min(1.0, way));
  return options_.learning_rate *
         static_cast<float>(options_.final_share + (1.0 - options_.final_share) * wave);
}

float AdamW::update(int step, float* parameters, const float* gradients) {
  const size_t blocks = (map_.size + kBlock - 1) / kBlock;
  std::vector<double> squares(blocks);
  pool_.parallel_for(static_cast<int64_t>(blocks), [&](int64_t block, int) {
    const size_t begin = block * kBlock, end = std::min(map_.size, begin + kBlock);
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += static_cast<double>(gradients[i]) * gradients[i];
    squares[block] = sum;
  });
  double total = 0;
  for (double sum : squares) total += sum;
  const float norm = static_cast<float>(std::sqrt(total));
  const float factor = norm > options_.clip ? options_.clip / norm : 1.0f;

  const float rate = learning_rate(step);
  const float correct1 = 1.0f - std::pow(options_.beta1, static_cast<float>(step + 1));
  const float correct2 = 1.0f - std::pow(options_.beta2, static_cast<float>(step + 1));
  const float b1 = options_.beta1, b2 = options_.beta2;
  for (const ParameterRange& range : map_.ranges()) {
    const float decay = range.decays ? 1.0f - rate * options_.weight_decay : 1.0f;
    const auto count = static_cast<int64_t>((range.size() + kBlock - 1) / kBlock);
    pool_.parallel_for(count, [&](int64_t block, int) {
      const size_t begin = range.offset + block * kBlock;
      const size_t end = std::min(range.end(), begin + kBlock);
      for (size_t i = begin; i < end; ++i) {
        const float g = gradients[i] * factor;
        const float m = first_[i] = b1 * first_[i] + (1.0f - b1) * g;
        const float v = second_[i] = b2 * second_[i] + (1.0f - b2) * g * g;
        const float step_size = (m / correct1) / (std::sqrt(v / correct2) + options_.epsilon);
        parameters[i] = parameters[i] * decay - rate * step_size;
      }
    });
  }
  return norm;
}

}  // namespace baton
