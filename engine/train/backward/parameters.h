// All parameters of a model in one flat fp32 array, ordered as their gradients become ready.
//
// The backward pass fills the gradient array from its front to its back: final norm (and lm_head),
// then the layers from last to first, the embedding at the end. A range that is ready can be summed
// over ranks while the rest is still being computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kernels/aligned.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"

namespace baton::engine::train {

// One matrix [rows][cols] inside the flat array; q, k and v are one, as are gate and up.
struct ParameterRange {
  size_t offset = 0;
  int rows = 0;
  int cols = 0;
  bool decays = false;  // matrices decay, norms do not
  size_t size() const { return static_cast<size_t>(rows) * cols; }
  size_t end() const { return offset + size(); }
};

struct LayerParameters {
  ParameterRange down;        // [d][F]
  ParameterRange gate_up;     // [2 F][d]
  ParameterRange post_norm;   // [1][d]
  ParameterRange output;      // [d][H * head_dim]
  ParameterRange qkv;         // [(H + 2 KV) * head_dim][d]
  ParameterRange input_norm;  // [1][d]
};

// The offsets of all parameters.
struct ParameterMap {
  explicit ParameterMap(const ModelConfig& model_config);

  ModelConfig config;
  ParameterRange final_norm;
  ParameterRange lm_head;  // the embedding's range if tied
  std::vector<LayerParameters> layers;
  ParameterRange embedding;
  size_t size = 0;

  // Every range once, in the order of the array.
  std::vector<ParameterRange> ranges() const;
};

// Normal(0, 0.02), projections into the residual stream divided by sqrt(2 L); norms are 1.
void initialize_parameters(const ParameterMap& map, uint64_t seed, float* values);

// To and from Hugging Face names; to rounds to bf16.
Checkpoint to_checkpoint(const ParameterMap& map, const float* values);
void from_checkpoint(const ParameterMap& map, const Checkpoint& checkpoint, float* values);

}  // namespace baton::engine::train
