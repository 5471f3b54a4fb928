// Small models from a counter-based generator: no library's distributions, so the same everywhere.
#include "tests/engine_model/test_model.h"

#include <cmath>

#include "engine/kernels/aligned.h"
#include "transport/base/splitmix.h"

namespace baton::engine {
namespace {

// Uniform in [-1, 1).
float uniform(uint64_t& state) {
  return static_cast<float>(static_cast<int64_t>(base::splitmix_next(state) >> 40) - (1 << 23)) *
         0x1p-23f;
}

}  // namespace

ModelConfig tiny_model_config() {
  ModelConfig config;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.num_layers = 2;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.head_dim = 16;
  config.vocab_size = 272;
  config.max_position_embeddings = 512;
  config.tie_word_embeddings = true;
  config.bos_token_id = 256;
  config.eos_token_ids = {256};
  return config;
}

ModelConfig tiny_qwen3_moe_config() {
  ModelConfig config = tiny_model_config();
  config.family = ModelFamily::kQwen3Moe;
  config.num_experts = 6;
  config.experts_per_token = 3;
  config.expert_size = 48;
  config.dense_layers = {true, false};
  return config;
}

ModelConfig tiny_mixtral_config() {
  ModelConfig config = tiny_model_config();
  config.family = ModelFamily::kMixtral;
  config.num_experts = 4;
  config.experts_per_token = 2;
  config.expert_size = config.intermediate_size;
  config.norm_topk_prob = true;
  return config;
}

Checkpoint make_test_checkpoint(const ModelConfig& config, uint64_t seed) {
  Checkpoint checkpoint;
  checkpoint.config = config;
  checkpoint.weights = weight_list(config);
  uint64_t state = seed;
  for (Weight& weight : checkpoint.weights) {
    weight.data.resize(static_cast<size_t>(weight.rows) * weight.cols);
    // Larger than a trained model's: the logits then depend on every layer and token.
    const float scale = 2.5f / std::sqrt(static_cast<float>(weight.cols));
    for (uint16_t& value : weight.data) {
      const float random = uniform(state);
      value = bf16_from_float(weight.is_vector ? 1.0f + 0.25f * random : scale * random);
    }
  }
  return checkpoint;
}

Tokenizer make_test_tokenizer(int vocab_size) {
  TokenizerSpec spec;
  for (int byte = 0; byte < 256; ++byte) spec.tokens.emplace_back(1, static_cast<char>(byte));
  spec.tokens.emplace_back("<|endoftext|>");
  spec.added_tokens = {{.id = 256}};
  const auto merge = [&spec](int32_t a, int32_t b) {
    spec.merges.emplace_back(a, b);
    spec.tokens.push_back(spec.tokens[a] + spec.tokens[b]);
    return static_cast<int32_t>(spec.tokens.size()) - 1;
  };
  const int32_t th = merge('t', 'h');
  merge(th, 'e');
  merge('i', 'n');
  merge('a', 'n');
  merge(' ', 'a');
  spec.tokens.resize(static_cast<size_t>(vocab_size));
  return *Tokenizer::create(std::move(spec));
}

absl::Status write_test_model(const std::string& directory, const ModelConfig& config,
                              uint64_t seed) {
  const Tokenizer tokenizer = make_test_tokenizer(config.vocab_size);
  return save_checkpoint(directory, make_test_checkpoint(config, seed), &tokenizer);
}

}  // namespace baton::engine
