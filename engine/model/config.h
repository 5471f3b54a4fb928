// The shape of a model of Llama's kind, read from and written as Hugging Face config.json.
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

// In which arithmetic a model computes: part of its identity, since KV and logits differ in it.
// kFp32: engine/kernels/gemm.h, weights in bf16, all else in fp32. The most exact, and the default.
// kBf16: engine/kernels/bf16_gemm.h, where what is multiplied with a weight is rounded to bf16 too.
// Many times as fast where the processor has AMX, twice where it has AVX-512's bf16, and the same
// bits where it has neither.
// Norms, attention, activations and the residual stream are in fp32 in both, embeddings in bf16.
enum class Arithmetic { kFp32, kBf16 };

constexpr const char* arithmetic_name(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kBf16 ? "bf16" : "fp32";
}

// The model_type of config.json. They differ in biases, norms, windows, experts and defaults alone.
enum class ModelFamily : uint8_t { kLlama, kMistral, kQwen2, kQwen3, kQwen3Moe, kMixtral };

// How rotary frequencies are stretched for contexts longer than the trained one, as in the Hugging
// Face rope utilities. Their "dynamic" changes nothing up to max_position_embeddings, where
// contexts end here: it is read as kNone.
struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1.0;
  double low_freq_factor = 1.0;                    // kLlama3
  double high_freq_factor = 4.0;                   // kLlama3
  double original_max_position_embeddings = 8192;  // kLlama3 and kYarn
  double beta_fast = 32.0;                         // kYarn, as all that follows
  double beta_slow = 1.0;
  double attention_factor = 1.0;  // on cosines and sines
  bool truncate = true;           // the ramp begins and ends at whole dimensions
};

// RMSNorm + RoPE (half-split) + grouped-query attention + SwiGLU; biases, norms of each query and
// key head, sliding windows and experts where the family has them.
struct ModelConfig {
  ModelFamily family = ModelFamily::kLlama;
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
  bool attention_bias = false;       // kLlama, kQwen3 and kQwen3Moe: of all four projections
  bool mlp_bias = false;             // kLlama
  int sliding_window = 0;            // tokens that a token sees, itself included; 0: all
  // Per layer: true if it has the window. Empty if all layers are alike.
  std::vector<bool> sliding_layers;
  // Mixture of experts (kQwen3Moe and kMixtral): in place of one feed-forward block a layer has
  // several, of which a router chooses some for each token and weighs what they say.
  int num_experts = 0;          // E, of a layer
  int experts_per_token = 0;    // k, chosen for each token
  int expert_size = 0;          // width of an expert's gate and up; of kMixtral intermediate_size
  bool norm_topk_prob = false;  // the weights of the chosen ones sum to one; of kMixtral they do
  // Per layer: true if it has one block of intermediate_size instead of experts. Empty if no layer
  // has.
  std::vector<bool> dense_layers;
  int32_t bos_token_id = -1;  // -1: none
  std::vector<int32_t> eos_token_ids;

  bool has_qkv_bias() const { return attention_bias || family == ModelFamily::kQwen2; }
  bool has_output_bias() const { return attention_bias; }
  bool has_qk_norm() const {
    return family == ModelFamily::kQwen3 || family == ModelFamily::kQwen3Moe;
  }
  bool may_have_experts() const {
    return family == ModelFamily::kQwen3Moe || family == ModelFamily::kMixtral;
  }
  bool has_experts(int layer) const {
    return num_experts > 0 && (dense_layers.empty() || !dense_layers[static_cast<size_t>(layer)]);
  }
  // Tokens that a token of this layer sees, itself included; 0: all.
  int window(int layer) const {
    return sliding_layers.empty() || sliding_layers[static_cast<size_t>(layer)] ? sliding_window
                                                                                : 0;
  }

  size_t num_parameters() const;
  // The KV cache this model needs, 16-token blocks.
  KvGeometry kv_geometry() const;
  // InvalidArgument naming the field that is out of range or inconsistent.
  absl::Status validate() const;
};

// Parses config.json. `model_type` must be "llama", "mistral", "qwen2", "qwen3", "qwen3_moe" or
// "mixtral"; what changes the arithmetic and is not known here (activations, rope types,
// quantization) is an error that names it, since ignoring it would give wrong text.
absl::StatusOr<ModelConfig> parse_model_config(std::string_view json);

// Adds the tokens that end text by generation_config.json, which may name more than config.json.
absl::Status read_generation_config(std::string_view json, ModelConfig& config);

// config.json that transformers loads; round-trips through parse_model_config.
std::string model_config_to_json(const ModelConfig& config);

}  // namespace baton::engine
