// The shape of a Llama-style model, read from and written as Hugging Face config.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/kernels/kv_cache.h"

namespace baton::engine {

// How rotary frequencies are stretched for contexts longer than the trained one.
struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3 };
  Kind kind = Kind::kNone;
  double factor = 1.0;
  // kLlama3 only ("Llama 3.1" scheme of the Hugging Face rope utilities).
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192;
};

// RMSNorm + RoPE (half-split) + grouped-query attention + SwiGLU, no biases.
struct ModelConfig {
  int hidden_size = 0;              // d
  int intermediate_size = 0;        // F, width of gate and up
  int num_layers = 0;               // L
  int num_heads = 0;                // H, query heads
  int num_kv_heads = 0;             // divides num_heads
  int head_dim = 0;                 // multiple of 16, at most 256
  int vocab_size = 0;               // V
  int max_position_embeddings = 0;  // longest context in tokens
  double rms_norm_eps = 1e-5;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool tie_word_embeddings = false;  // lm_head shares the embedding matrix
  int32_t bos_token_id = -1;         // -1: none
  std::vector<int32_t> eos_token_ids;

  size_t num_parameters() const;
  // The KV cache this model needs, 16-token blocks.
  KvGeometry kv_geometry() const;
  // InvalidArgument naming the field that is out of range or inconsistent.
  absl::Status validate() const;
};

// Parses config.json. `model_type` must be "llama" or "mistral" without a sliding window; biases,
// unknown activations and unknown rope types are errors, since ignoring them would give wrong text.
absl::StatusOr<ModelConfig> parse_model_config(std::string_view json);

// config.json that transformers' LlamaForCausalLM loads; round-trips through parse_model_config.
std::string model_config_to_json(const ModelConfig& config);

}  // namespace baton::engine
