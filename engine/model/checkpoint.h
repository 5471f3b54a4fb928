// A model's weights in Hugging Face order and names, in memory, with load and save of directories.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/config.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine {

// One weight: bf16 bits, row-major, [rows][cols] as in Hugging Face ([out][in]); norms are
// [1][hidden].
struct Weight {
  std::string name;  // "model.layers.3.self_attn.q_proj.weight"
  int rows = 0;
  int cols = 0;
  bool is_vector = false;  // stored with a one-dimensional shape
  std::vector<uint16_t> data;
};

// The weights of a layer, in the order in which Checkpoint::weights holds them. A plain Llama has
// the first kPerLayer; another layer has those that its config calls for, and behind them, where it
// has experts, those of each expert.
enum LayerWeight {
  kInputNorm,
  kQuery,
  kKey,
  kValue,
  kOutput,
  kPostNorm,
  kGate,
  kUp,
  kDown,
  kPerLayer,
  kQueryBias = kPerLayer,
  kKeyBias,
  kValueBias,
  kOutputBias,
  kGateBias,
  kUpBias,
  kDownBias,
  kQueryNorm,  // of each head, before the rotation
  kKeyNorm,
  kRouter,  // of experts, in place of kGate, kUp and kDown
  kLayerWeightKinds
};

enum ExpertWeight { kExpertGate, kExpertUp, kExpertDown, kPerExpert };

// True if this layer of such a model has this weight.
bool has_weight(const ModelConfig& config, int layer, LayerWeight kind);

struct Checkpoint {
  ModelConfig config;
  // Embedding, then each layer's weights in the order of LayerWeight, the final norm and, if
  // embeddings are not tied, lm_head.
  std::vector<Weight> weights;
  // Remarks for the program that loads the checkpoint, one line each: unused tensors, a config that
  // contradicts the files.
  std::vector<std::string> remarks;

  const Weight& embedding() const { return weights[0]; }
  // A weight that the config requires.
  const Weight& layer(int l, LayerWeight kind) const;
  // The experts of a layer that has some: [num_experts][kPerExpert].
  std::span<const Weight> experts(int l) const;
  const Weight& final_norm() const;
  // Frees the numbers of a layer's weights, when they have been packed.
  void forget_layer(int l);
  const Weight& lm_head() const { return config.tie_word_embeddings ? weights[0] : weights.back(); }
};

// The weights that a config calls for, names and shapes set, data empty.
std::vector<Weight> weight_list(const ModelConfig& config);

// 32 hex digits that stand for the weights (as bf16, whatever files they came from) and for those
// parts of the config that logits follow from: a hash of all of it (XXH3, 128 bits). Two
// checkpoints of one shape have different ones.
std::string fingerprint(const Checkpoint& checkpoint);

// Reads config.json and model.safetensors, or model.safetensors.index.json and its shards: the
// index alone says which file holds a tensor. Where config.json ties the output to the embedding
// and the files hold two that differ, the checkpoint's config says that they are not tied. Tensors
// that the config does not call for are left out. Errors name the file, the tensor, what was found
// and what was expected.
absl::StatusOr<Checkpoint> load_checkpoint(const std::string& directory);

// Parses model.safetensors.index.json: the file of each tensor. File names have no path parts.
absl::StatusOr<std::map<std::string, std::string>> parse_shard_index(std::string_view json);

// Writes config.json, generation_config.json and model.safetensors (bf16), each atomically; with
// a tokenizer, tokenizer.json and tokenizer_config.json too. Creates the directory.
absl::Status save_checkpoint(const std::string& directory, const Checkpoint& checkpoint,
                             const Tokenizer* tokenizer);

}  // namespace baton::engine
