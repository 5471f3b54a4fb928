// The flat parameter array: layout, initial values, conversion.
#include "engine/train/backward/parameters.h"

#include <cmath>
#include <numbers>

#include "transport/base/splitmix.h"

namespace baton::engine::train {
namespace {

// splitmix64, and Box and Muller's normal numbers on top of it.
struct Random {
  uint64_t state;
  double uniform() {
    return (static_cast<double>(base::splitmix_next(state) >> 11) + 0.5) * 0x1p-53;
  }
  float normal() {
    return static_cast<float>(std::sqrt(-2.0 * std::log(uniform())) *
                              std::cos(2.0 * std::numbers::pi * uniform()));
  }
};

// The Hugging Face weights that make up each range, top to bottom.
template <typename Visit>
void for_each_weight(const ParameterMap& map, Visit&& visit) {
  const auto at = [](int l, LayerWeight kind) { return 1 + l * kPerLayer + kind; };
  visit(0, map.embedding, 0);
  for (int l = 0; l < map.config.num_layers; ++l) {
    const LayerParameters& p = map.layers[l];
    const int q = map.config.num_heads * map.config.head_dim;
    const int kv = map.config.num_kv_heads * map.config.head_dim;
    visit(at(l, kInputNorm), p.input_norm, 0);
    visit(at(l, kQuery), p.qkv, 0);
    visit(at(l, kKey), p.qkv, q);
    visit(at(l, kValue), p.qkv, q + kv);
    visit(at(l, kOutput), p.output, 0);
    visit(at(l, kPostNorm), p.post_norm, 0);
    visit(at(l, kGate), p.gate_up, 0);
    visit(at(l, kUp), p.gate_up, map.config.intermediate_size);
    visit(at(l, kDown), p.down, 0);
  }
  visit(1 + map.config.num_layers * kPerLayer, map.final_norm, 0);
  if (!map.config.tie_word_embeddings) {
    visit(2 + map.config.num_layers * kPerLayer, map.lm_head, 0);
  }
}

}  // namespace

ParameterMap::ParameterMap(const ModelConfig& model_config) : config(model_config) {
  const int d = config.hidden_size, f = config.intermediate_size;
  const int q = config.num_heads * config.head_dim, kv = config.num_kv_heads * config.head_dim;
  const auto take = [this](int rows, int cols) {
    ParameterRange range{size, rows, cols, rows > 1};
    size = range.end();
    return range;
  };
  if (!config.tie_word_embeddings) lm_head = take(config.vocab_size, d);
  final_norm = take(1, d);
  layers.resize(config.num_layers);
  for (int l = config.num_layers; l-- > 0;) {
    layers[l].down = take(d, f);
    layers[l].gate_up = take(2 * f, d);
    layers[l].post_norm = take(1, d);
    layers[l].output = take(d, q);
    layers[l].qkv = take(q + 2 * kv, d);
    layers[l].input_norm = take(1, d);
  }
  embedding = take(config.vocab_size, d);
  if (config.tie_word_embeddings) lm_head = embedding;
}

std::vector<ParameterRange> ParameterMap::ranges() const {
  std::vector<ParameterRange> out;
  if (!config.tie_word_embeddings) out.push_back(lm_head);
  out.push_back(final_norm);
  for (size_t l = layers.size(); l-- > 0;) {
    const LayerParameters& p = layers[l];
    out.insert(out.end(), {p.down, p.gate_up, p.post_norm, p.output, p.qkv, p.input_norm});
  }
  out.push_back(embedding);
  return out;
}

void initialize_parameters(const ParameterMap& map, uint64_t seed, float* values) {
  Random random{seed};
  for (const ParameterRange& range : map.ranges()) {
    for (size_t i = range.offset; i < range.end(); ++i) {
      values[i] = range.decays ? 0.02f * random.normal() : 1.0f;
    }
  }
  const float smaller = 1.0f / std::sqrt(2.0f * static_cast<float>(map.config.num_layers));
  for (const LayerParameters& layer : map.layers) {
    for (const ParameterRange& range : {layer.down, layer.output}) {
      for (size_t i = range.offset; i < range.end(); ++i) values[i] *= smaller;
    }
  }
}

Checkpoint to_checkpoint(const ParameterMap& map, const float* values) {
  Checkpoint checkpoint;
  checkpoint.config = map.config;
  checkpoint.weights = weight_list(map.config);
  for_each_weight(map, [&](int index, const ParameterRange& range, int row) {
    Weight& weight = checkpoint.weights[index];
    const float* from = values + range.offset + static_cast<size_t>(row) * range.cols;
    weight.data.resize(static_cast<size_t>(weight.rows) * weight.cols);
    for (size_t i = 0; i < weight.data.size(); ++i) weight.data[i] = bf16_from_float(from[i]);
  });
  return checkpoint;
}

void from_checkpoint(const ParameterMap& map, const Checkpoint& checkpoint, float* values) {
  for_each_weight(map, [&](int index, const ParameterRange& range, int row) {
    const Weight& weight = checkpoint.weights[index];
    float* to = values + range.offset + static_cast<size_t>(row) * range.cols;
    for (size_t i = 0; i < weight.data.size(); ++i) to[i] = float_from_bf16(weight.data[i]);
  });
}

}  // namespace baton::engine::train
