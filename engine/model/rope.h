// The angles of the rotary embedding, for every position of a model's context.
#pragma once

#include <cstddef>
#include <vector>

#include "engine/model/config.h"

namespace baton::engine {

// Angles of every position: cos and sin [positions][head_dim / 2].
struct RopeTable {
  RopeTable() = default;
  RopeTable(const ModelConfig& config, int positions);
  const float* cos(int position) const { return cosines.data() + size_t(position) * half; }
  const float* sin(int position) const { return sines.data() + size_t(position) * half; }
  int half = 0;
  std::vector<float> cosines, sines;
};

// Rotary frequencies per pair (head_dim / 2), with the config's scaling applied; its attention
// factor is in the table alone.
std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace baton::engine
