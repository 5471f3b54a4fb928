// Rotary frequencies with a config's scaling, and the table of their angles.
#include "engine/model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace baton::engine {

namespace {

// How much of each dimension's frequency is left as trained, in [0, 1]: dimensions that turn more
// than beta_fast times in the trained context keep theirs, below beta_slow turns all is stretched.
std::vector<double> yarn_kept(const ModelConfig& config) {
  const RopeScaling& scaling = config.rope_scaling;
  const double dims = config.head_dim;
  const auto dimension_of = [&](double turns) {
    return dims *
           std::log(scaling.original_max_position_embeddings / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.rope_theta));
  };
  double low = dimension_of(scaling.beta_fast), high = dimension_of(scaling.beta_slow);
  if (scaling.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;
  std::vector<double> kept(static_cast<size_t>(config.head_dim / 2));
  for (size_t i = 0; i < kept.size(); ++i) {
    kept[i] = 1 - std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
  }
  return kept;
}

}  // namespace

// Scaling as in transformers' modeling_rope_utils.py.
std::vector<double> rope_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(static_cast<size_t>(config.head_dim / 2));
  const RopeScaling& scaling = config.rope_scaling;
  std::vector<double> kept;
  if (scaling.kind == RopeScaling::Kind::kYarn) kept = yarn_kept(config);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / config.head_dim;
    double frequency = std::pow(config.rope_theta, -exponent);
    if (scaling.kind == RopeScaling::Kind::kLinear) {
      frequency /= scaling.factor;
    } else if (scaling.kind == RopeScaling::Kind::kYarn) {
      frequency = frequency * kept[i] + frequency / scaling.factor * (1 - kept[i]);
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
  const double factor = config.rope_scaling.attention_factor;
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < half; ++i) {
      const double angle = p * frequencies[static_cast<size_t>(i)];
      cosines[size_t(p) * half + i] = static_cast<float>(std::cos(angle) * factor);
      sines[size_t(p) * half + i] = static_cast<float>(std::sin(angle) * factor);
    }
  }
}

}  // namespace baton::engine
