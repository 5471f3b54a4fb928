// Rotary frequencies with a config's scaling, and the table of their angles.
#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace baton::engine {

// Scaling as in transformers' modeling_rope_utils.py.
std::vector<double> rope_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(static_cast<size_t>(config.head_dim / 2));
  const RopeScaling& scaling = config.rope_scaling;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / config.head_dim;
    double frequency = std::pow(config.rope_theta, -exponent);
    if (scaling.kind == RopeScaling::Kind::kLinear) {
      frequency /= scaling.factor;
    } else if (scaling.kind == RopeScaling::Kind::kLlama3) {
      const double turns =
          scaling.original_max_position_embeddings * frequency / (2 * std::numbers::pi);
      const double smooth = std::clamp(
          (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
          0.0, 1.0);
      frequency = frequency * smooth + frequency / scaling.factor * (1 - smooth);
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

RopeTable::RopeTable(const ModelConfig& config, int positions)
    : half(config.head_dim / 2),
      cosines(static_cast<size_t>(positions) * static_cast<size_t>(half)),
      sines(cosines.size()) {
  const std::vector<double> frequencies = rope_frequencies(config);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = p * frequencies[static_cast<size_t>(i)];
      cosines[size_t(p) * half + i] = static_cast<float>(std::cos(angle));
      sines[size_t(p) * half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace baton::engine
