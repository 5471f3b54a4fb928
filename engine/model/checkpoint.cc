// Checkpoint: Hugging Face directories in and out.
#include "engine/model/checkpoint.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/files/safetensors.h"
#include "engine/kernels/aligned.h"
#include "engine/kernels/attention.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine {
namespace {

constexpr size_t kMaxConfigBytes = 16 << 20;
constexpr size_t kMaxShards = 1000;

float float_from_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = (bits >> 10) & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// Copies a tensor's bytes, which need not be aligned, as bf16.
void copy_as_bf16(TensorType type, std::string_view bytes, std::vector<uint16_t>& out) {
  if (type == TensorType::kBf16) {
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return;
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (type == TensorType::kF32) {
      float value = 0;
      std::memcpy(&value, bytes.data() + i * 4, 4);
      out[i] = bf16_from_float(value);
    } else {
      uint16_t value = 0;
      std::memcpy(&value, bytes.data() + i * 2, 2);
      out[i] = bf16_from_float(float_from_f16(value));
    }
  }
}

// The files of a checkpoint, and which of them holds a tensor.
struct Shards {
  std::vector<SafetensorsFile> files;
  std::map<std::string, size_t, std::less<>> places;
  std::string where;  // for errors
};

// Where there is an index, it alone says where a tensor is: a copy in another file is stale.
absl::StatusOr<Shards> open_shards(const std::string& directory) {
  Shards shards{.where = directory + "/model.safetensors.index.json"};
  auto index = read_file(shards.where, size_t{64} << 20);
  if (absl::IsNotFound(index.status())) {
    shards.where = directory + "/model.safetensors";
    auto file = SafetensorsFile::open(shards.where);
    if (!file.ok()) return file.status();
    for (const auto& [name, info] : file->header().tensors) shards.places[name] = 0;
    shards.files.push_back(*std::move(file));
    return shards;
  }
  if (!index.ok()) return index.status();
  auto map = parse_shard_index(*index);
  if (!map.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(shards.where, ": ", map.status().message()));
  }
  std::map<std::string, size_t> opened;
  for (const auto& [tensor, name] : *map) {
    const auto [place, is_new] = opened.emplace(name, shards.files.size());
    if (is_new) {
      auto file = SafetensorsFile::open(directory + "/" + name);
      if (!file.ok()) return file.status();
      shards.files.push_back(*std::move(file));
    }
    shards.places[tensor] = place->second;
  }
  return shards;
}

size_t bytes_of(const Weight& weight) {
  return size_t(weight.rows) * size_t(weight.cols) * sizeof(uint16_t);
}

// `name` is what the files call it.
absl::Status load_weight(const Shards& shards, const std::string& name, Weight& weight) {
  const auto place = shards.places.find(name);
  if (place == shards.places.end()) {
    return absl::NotFoundError(
        absl::StrCat(shards.where, " lacks the tensor \"", name, "\" that config.json requires"));
  }
  const SafetensorsFile& file = shards.files[place->second];
  const auto found = file.find(name);
  if (!found.ok()) {
    return absl::NotFoundError(
        absl::StrCat(found.status().message(), ", where ", shards.where, " says that it is"));
  }
  const TensorInfo& info = **found;
  if (info.type == TensorType::kOther) {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path(), ": tensor \"", name, "\" is neither F32, F16 nor BF16"));
  }
  std::vector<size_t> expected = {size_t(weight.rows), size_t(weight.cols)};
  if (weight.is_vector) expected = {size_t(weight.cols)};
  if (info.shape != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        file.path(), ": tensor \"", name, "\" has shape [", absl::StrJoin(info.shape, ", "),
        "] but config.json calls for [", absl::StrJoin(expected, ", "), "]"));
  }
  weight.data.resize(info.elements());
  copy_as_bf16(info.type, file.data(info), weight.data);
  return absl::OkStatus();
}

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kHead[] = "lm_head.weight";

// Where the config ties the output to the embedding and the files have both, the files are right if
// the two differ: as in transformers. Where they have the output's alone it is the embedding, too.
absl::Status load_tied(const Shards& shards, Checkpoint& checkpoint) {
  Weight& embedding = checkpoint.weights[0];
  const bool has_both = shards.places.contains(kEmbedding) && shards.places.contains(kHead);
  const bool has_head_alone = !has_both && shards.places.contains(kHead);
  absl::Status status = load_weight(shards, has_head_alone ? kHead : kEmbedding, embedding);
  if (!status.ok() || !has_both) return status;
  Weight head{.name = kHead, .rows = embedding.rows, .cols = embedding.cols};
  if (status = base::memory_fits(kHead, bytes_of(head)); !status.ok()) return status;
  status = load_weight(shards, kHead, head);
  if (!status.ok() || head.data == embedding.data) return status;
  checkpoint.config.tie_word_embeddings = false;
  checkpoint.weights.push_back(std::move(head));
  checkpoint.remarks.emplace_back(
      "config.json ties lm_head.weight to the embedding, but the two differ: each is used as it "
      "is");
  return absl::OkStatus();
}

// One line that names what the files hold and the model does not have.
void remark_unused(const Shards& shards, Checkpoint& checkpoint) {
  std::set<std::string_view> used = {kHead};  // tied, where it is not in the list
  for (const Weight& weight : checkpoint.weights) used.insert(weight.name);
  std::vector<std::string> unused;
  for (const auto& [name, file] : shards.places) {
    // Older files hold the rotation's frequencies, which follow from the config.
    if (!used.contains(name) && !name.ends_with(".rotary_emb.inv_freq")) unused.push_back(name);
  }
  if (unused.empty()) return;
  const size_t count = unused.size();
  constexpr size_t kMostNamed = 8;
  unused.resize(std::min(count, kMostNamed));
  checkpoint.remarks.push_back(
      absl::StrCat(shards.where, " has ", count, count == 1 ? " tensor" : " tensors",
                   " that config.json does not call for, unused: ", absl::StrJoin(unused, ", "),
                   count > kMostNamed ? absl::StrCat(" and ", count - kMostNamed, " more") : ""));
}

}  // namespace

bool has_weight(const ModelConfig& config, int layer, LayerWeight kind) {
  switch (kind) {
    case kGate:
    case kUp:
    case kDown:
      return !config.has_experts(layer);
    case kQueryBias:
    case kKeyBias:
    case kValueBias:
      return config.has_qkv_bias();
    case kOutputBias:
      return config.has_output_bias();
    case kGateBias:
    case kUpBias:
    case kDownBias:
      return config.mlp_bias;
    case kQueryNorm:
    case kKeyNorm:
      return config.has_qk_norm();
    case kRouter:
      return config.has_experts(layer);
    default:
      return true;
  }
}

namespace {

// The number of a layer's weights before this kind.
size_t kinds_before(const ModelConfig& config, int layer, int kind) {
  size_t count = 0;
  for (int before = 0; before < kind; ++before) {
    count += has_weight(config, layer, LayerWeight(before)) ? 1 : 0;
  }
  return count;
}

// Where a layer's weights begin in Checkpoint::weights; that of the layer behind the last: where
// its fellows end.
size_t weights_before(const ModelConfig& config, int layer) {
  size_t count = 1;  // the embedding
  for (int l = 0; l < layer; ++l) {
    count += kinds_before(config, l, kLayerWeightKinds);
    if (config.has_experts(l)) count += size_t(config.num_experts) * kPerExpert;
  }
  return count;
}

}  // namespace

const Weight& Checkpoint::layer(int l, LayerWeight kind) const {
  return weights[weights_before(config, l) + kinds_before(config, l, kind)];
}

std::span<const Weight> Checkpoint::experts(int l) const {
  return std::span(weights).subspan(
      weights_before(config, l) + kinds_before(config, l, kLayerWeightKinds),
      size_t(config.num_experts) * kPerExpert);
}

void Checkpoint::forget_layer(int l) {
  const size_t end = weights_before(config, l + 1);
  for (size_t i = weights_before(config, l); i < end; ++i)
    std::vector<uint16_t>().swap(weights[i].data);
}

const Weight& Checkpoint::final_norm() const {
  return weights[weights_before(config, config.num_layers)];
}

std::vector<Weight> weight_list(const ModelConfig& c) {
  const int d = c.hidden_size, q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  const int f = c.intermediate_size;
  const bool mixtral = c.family == ModelFamily::kMixtral;
  const std::string experts = mixtral ? "block_sparse_moe" : "mlp";
  const std::string router = experts + ".gate.weight";
  const struct {
    LayerWeight kind;
    const char* name;
    int rows;  // 0: a vector
    int cols;
  } layer[] = {{kInputNorm, "input_layernorm.weight", 0, d},
               {kQuery, "self_attn.q_proj.weight", q, d},
               {kKey, "self_attn.k_proj.weight", kv, d},
               {kValue, "self_attn.v_proj.weight", kv, d},
               {kOutput, "self_attn.o_proj.weight", d, q},
               {kPostNorm, "post_attention_layernorm.weight", 0, d},
               {kGate, "mlp.gate_proj.weight", f, d},
               {kUp, "mlp.up_proj.weight", f, d},
               {kDown, "mlp.down_proj.weight", d, f},
               {kQueryBias, "self_attn.q_proj.bias", 0, q},
               {kKeyBias, "self_attn.k_proj.bias", 0, kv},
               {kValueBias, "self_attn.v_proj.bias", 0, kv},
               {kOutputBias, "self_attn.o_proj.bias", 0, d},
               {kGateBias, "mlp.gate_proj.bias", 0, f},
               {kUpBias, "mlp.up_proj.bias", 0, f},
               {kDownBias, "mlp.down_proj.bias", 0, d},
               {kQueryNorm, "self_attn.q_norm.weight", 0, c.head_dim},
               {kKeyNorm, "self_attn.k_norm.weight", 0, c.head_dim},
               {kRouter, router.c_str(), c.num_experts, d}};
  const struct {
    const char* name;
    int rows;
    int cols;
  } expert[kPerExpert] = {{mixtral ? "w1.weight" : "gate_proj.weight", c.expert_size, d},
                          {mixtral ? "w3.weight" : "up_proj.weight", c.expert_size, d},
                          {mixtral ? "w2.weight" : "down_proj.weight", d, c.expert_size}};
  std::vector<Weight> list;
  const auto add = [&](std::string name, int rows, int cols) {
    list.push_back(
        {.name = std::move(name), .rows = std::max(rows, 1), .cols = cols, .is_vector = rows == 0});
  };
  add("model.embed_tokens.weight", c.vocab_size, d);
  for (int l = 0; l < c.num_layers; ++l) {
    const std::string prefix = absl::StrCat("model.layers.", l, ".");
    for (const auto& weight : layer) {
      if (has_weight(c, l, weight.kind)) add(prefix + weight.name, weight.rows, weight.cols);
    }
    for (int e = 0; e < (c.has_experts(l) ? c.num_experts : 0); ++e) {
      for (const auto& weight : expert) {
        add(absl::StrCat(prefix, experts, ".experts.", e, ".", weight.name), weight.rows,
            weight.cols);
      }
    }
  }
  add("model.norm.weight", 0, d);
  if (!c.tie_word_embeddings) add("lm_head.weight", c.vocab_size, d);
  return list;
}

std::string fingerprint(const Checkpoint& checkpoint) {
  ModelConfig config = checkpoint.config;
  config.bos_token_id = -1;
  config.eos_token_ids.clear();
  config.max_position_embeddings = 0;
  // And how attention adds: KV of another order of its sums is another's.
  const std::string text =
      absl::StrCat(model_config_to_json(config), "; attention in splits of ", kSplitTokens);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(),
                                                                             XXH3_freeState);
  XXH3_128bits_reset(hash.get());
  XXH3_128bits_update(hash.get(), text.data(), text.size());
  for (const Weight& weight : checkpoint.weights) {
    XXH3_128bits_update(hash.get(), weight.data.data(), weight.data.size() * sizeof(uint16_t));
  }
  const XXH128_hash_t sum = XXH3_128bits_digest(hash.get());
  return absl::StrFormat("%016x%016x", sum.high64, sum.low64);
}

absl::StatusOr<std::map<std::string, std::string>> parse_shard_index(std::string_view text) {
  auto json = parse_json(text, "the shard index");
  if (!json.ok()) return json.status();
  const nlohmann::json& map = member(*json, "weight_map");
  if (!map.is_object() || map.empty()) {
    return absl::InvalidArgumentError("the shard index has no \"weight_map\"");
  }
  std::set<std::string> names;
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map.items()) {
    if (!file.is_string()) return absl::InvalidArgumentError("a shard name is not a string");
    const std::string& name = file.get_ref<const std::string&>();
    if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError("a shard name is not a plain file name");
    }
    names.insert(name);
    files[tensor] = name;
    if (names.size() > kMaxShards) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxShards, " shards"));
    }
  }
  return files;
}

absl::StatusOr<Checkpoint> load_checkpoint(const std::string& directory) {
  const std::string config_path = directory + "/config.json";
  auto text = read_file(config_path, kMaxConfigBytes);
  if (!text.ok()) {
    return absl::Status(
        text.status().code(),
        absl::StrCat("cannot load a model from ", directory, ": ", text.status().message(),
                     "; give a Hugging Face directory with config.json, "
                     "model.safetensors and tokenizer.json"));
  }
  auto config = parse_model_config(*text);
  if (!config.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(directory, ": ", config.status().message()));
  }
  const auto generation = read_file(directory + "/generation_config.json", kMaxConfigBytes);
  if (generation.ok()) {
    const absl::Status status = read_generation_config(*generation, *config);
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(directory, ": ", status.message()));
    }
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  auto shards = open_shards(directory);
  if (!shards.ok()) return shards.status();
  Checkpoint checkpoint{.config = *std::move(config)};
  checkpoint.weights = weight_list(checkpoint.config);
  size_t left = 0;  // bytes that are not in memory yet
  for (const Weight& weight : checkpoint.weights) left += bytes_of(weight);
  size_t asked = SIZE_MAX;
  for (Weight& weight : checkpoint.weights) {
    const bool tied = checkpoint.config.tie_word_embeddings && weight.name == kEmbedding;
    if (tied) continue;  // loaded last
    // Asked again and again: other processes, ranks of this model among them, load meanwhile.
    constexpr size_t kAskEvery = size_t{64} << 20;
    if (asked - left >= kAskEvery) {
      absl::Status fits = base::memory_fits(
          absl::StrCat("what is to be loaded of the weights in ", directory), left);
      if (!fits.ok()) return fits;
      asked = left;
    }
    left -= bytes_of(weight);
    if (absl::Status status = load_weight(*shards, weight.name, weight); !status.ok())
      return status;
  }
  if (checkpoint.config.tie_word_embeddings) {
    if (absl::Status status = load_tied(*shards, checkpoint); !status.ok()) return status;
  }
  remark_unused(*shards, checkpoint);
  return checkpoint;
}

absl::Status save_checkpoint(const std::string& directory, const Checkpoint& checkpoint,
                             const Tokenizer* tokenizer) {
  if (absl::Status status = make_directories(directory); !status.ok()) return status;
  std::vector<TensorToWrite> tensors;
  for (const Weight& weight : checkpoint.weights) {
    std::vector<size_t> shape = {size_t(weight.rows), size_t(weight.cols)};
    if (weight.is_vector) shape = {size_t(weight.cols)};
    tensors.push_back({weight.name, TensorType::kBf16, shape,
                       std::as_bytes(std::span<const uint16_t>(weight.data))});
  }
  const ModelConfig& config = checkpoint.config;
  nlohmann::ordered_json generation = {{"max_length", config.max_position_embeddings}};
  if (config.bos_token_id >= 0) generation["bos_token_id"] = config.bos_token_id;
  if (!config.eos_token_ids.empty()) generation["eos_token_id"] = config.eos_token_ids;
  absl::Status status =
      write_safetensors(directory + "/model.safetensors", tensors, {{"format", "pt"}});
  status.Update(write_file_atomically(directory + "/config.json", model_config_to_json(config)));
  status.Update(
      write_file_atomically(directory + "/generation_config.json", generation.dump(2) + "\n"));
  if (tokenizer == nullptr || !status.ok()) return status;
  nlohmann::ordered_json settings = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                                     {"model_max_length", config.max_position_embeddings},
                                     {"clean_up_tokenization_spaces", false}};
  if (!config.eos_token_ids.empty()) {
    settings["eos_token"] = std::string(tokenizer->token_bytes(config.eos_token_ids[0]));
  }
  status.Update(write_file_atomically(directory + "/tokenizer.json", tokenizer->to_json()));
  status.Update(
      write_file_atomically(directory + "/tokenizer_config.json", settings.dump(2) + "\n"));
  return status;
}

}  // namespace baton::engine
