// Tiny models with random weights, for tests: the same bits for the same seed everywhere.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "engine/model/checkpoint.h"
#include "engine/model/config.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

// d 32, 2 layers, 2 query heads of 16, 1 KV head, F 64, V 272, 512 positions: about 30 KB.
ModelConfig tiny_model_config();

// The same with a layer of 6 experts of width 48, 3 of them for a token, behind one without; K and
// Q have norms.
ModelConfig tiny_qwen3_moe_config();
// The same with 4 experts of width 64 in each layer, 2 of them for a token.
ModelConfig tiny_mixtral_config();

// Random weights scaled so that greedy text depends on all of the context. `config` must be valid.
Checkpoint make_test_checkpoint(const ModelConfig& config, uint64_t seed);

// A tokenizer of 256 bytes, a few merges and "<|endoftext|>" with ids below `vocab_size` (>= 272).
Tokenizer make_test_tokenizer(int vocab_size = 272);

// Writes the whole Hugging Face directory (weights and tokenizer).
absl::Status write_test_model(const std::string& directory, const ModelConfig& config,
                              uint64_t seed);

}  // namespace baton::engine
