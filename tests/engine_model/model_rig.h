// A test model with a cache of its own, for tests of the forward pass.
#pragma once

#include <span>

#include "engine/kernels/aligned.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model.h"
#include "tests/engine_model/same_bits.h"
#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine {

using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

inline Tokens random_tokens(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  Tokens tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % uint32_t(vocab));
  return tokens;
}

// A model with a cache of its own, whose free slots hold NaN.
struct Rig {
  explicit Rig(const Checkpoint& checkpoint, int threads = 1, size_t blocks = 80,
               Arithmetic arithmetic = Arithmetic::kFp32, Bf16Unit unit = Bf16Unit::kVectors)
      : model(*Model::create(checkpoint, arithmetic)),
        pool(threads),
        memory(model.kv_geometry().cache_bytes(blocks) / 2),
        cache(model.kv_geometry(), memory.data(), blocks),
        workspace(
            *model.make_workspace({.max_tokens = 256, .max_chunks = 8, .bf16_unit = unit}, pool)) {
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = 0x7fc0;
  }
  // Some blocks for `tokens` tokens, not in order; each call gives others.
  std::vector<uint32_t> take(size_t tokens) {
    std::vector<uint32_t> table(model.kv_geometry().blocks_for(tokens));
    for (uint32_t& block : table) block = uint32_t((next_block++ * 7) % cache.num_blocks());
    return table;
  }
  Logits run(std::vector<SequenceChunk> chunks) {
    const size_t vocab = size_t(model.config().vocab_size);
    Logits logits(chunks.size() * vocab, -1.0f);
    LayerHook hook;
    const absl::Status status = model.forward(chunks, cache, hook, workspace, logits.data());
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
  // Logits of the last token, the prompt cut into pieces of `piece` tokens.
  Logits prompt(const Tokens& tokens, const std::vector<uint32_t>& table, size_t piece) {
    Logits logits;
    for (size_t at = 0; at < tokens.size(); at += piece) {
      const size_t count = std::min(piece, tokens.size() - at);
      logits = run({{std::span(tokens).subspan(at, count), int32_t(at), table, true}});
    }
    return logits;
  }

  Model model;
  ComputePool pool;
  AlignedArray<uint16_t> memory;
  KvCache cache;
  Workspace workspace;
  size_t next_block = 1;
};

// One of each kind of model that is more than a plain Llama.
inline std::vector<ModelConfig> family_configs() {
  ModelConfig llama = tiny_model_config();
  llama.attention_bias = llama.mlp_bias = true;
  ModelConfig mistral = tiny_model_config();
  mistral.family = ModelFamily::kMistral;
  mistral.sliding_window = 21;
  ModelConfig qwen2 = tiny_model_config();
  qwen2.family = ModelFamily::kQwen2;
  qwen2.num_kv_heads = 2;
  qwen2.sliding_window = 9;
  qwen2.sliding_layers = {false, true};
  ModelConfig qwen3 = tiny_model_config();
  qwen3.family = ModelFamily::kQwen3;
  qwen3.head_dim = 48;
  qwen3.rope_scaling = {.kind = RopeScaling::Kind::kYarn,
                        .factor = 4,
                        .original_max_position_embeddings = 128,
                        .attention_factor = 1.1};
  return {llama, mistral, qwen2, qwen3, tiny_qwen3_moe_config(), tiny_mixtral_config()};
}

inline ModelConfig odd_config() {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 48;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.head_dim = 32;
  config.num_layers = 3;
  config.intermediate_size = 80;
  config.vocab_size = 301;
  config.tie_word_embeddings = false;
  return config;
}

// More of both than the tiny ones have: an odd number of experts.
inline ModelConfig many_experts_config() {
  ModelConfig many = odd_config();
  many.family = ModelFamily::kQwen3Moe;
  many.num_experts = 37;
  many.experts_per_token = 5;
  many.expert_size = 112;
  many.norm_topk_prob = true;
  many.dense_layers = {false, true, false};
  return many;
}

}  // namespace baton::engine
