// ModelConfig from and to Hugging Face config.json.
#include "engine/model/config.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/model/config_parts.h"
#include "engine/model/shard.h"

namespace baton::engine {
namespace {

constexpr auto kReplace = nlohmann::json::error_handler_t::replace;

constexpr struct {
  ModelFamily family;
  const char* type;
  const char* architecture;
} kFamilies[] = {{ModelFamily::kLlama, "llama", "LlamaForCausalLM"},
                 {ModelFamily::kMistral, "mistral", "MistralForCausalLM"},
                 {ModelFamily::kQwen2, "qwen2", "Qwen2ForCausalLM"},
                 {ModelFamily::kQwen3, "qwen3", "Qwen3ForCausalLM"},
                 {ModelFamily::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
                 {ModelFamily::kMixtral, "mixtral", "MixtralForCausalLM"}};

// The defaults of transformers for fields that a file lacks.
struct Silent {
  int kv_heads;  // 0: as many as query heads
  double eps;
  double theta;
};
Silent silent_values(ModelFamily family) {
  switch (family) {
    case ModelFamily::kMistral:
      return {8, 1e-6, 10000.0};
    case ModelFamily::kQwen3Moe:
      return {4, 1e-6, 10000.0};
    case ModelFamily::kMixtral:
      return {8, 1e-5, 1000000.0};
    default:
      return {0, 1e-6, 10000.0};
  }
}

absl::Status field_error(const char* field, int value, const char* rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", field, " is ", value, "; it must be ", rule));
}

// A token id, or a list of them.
absl::Status read_eos(const nlohmann::json& json, ModelConfig& config) {
  const nlohmann::json& eos = member(json, "eos_token_id");
  std::vector<int32_t>& ids = config.eos_token_ids;
  const auto add = [&](int64_t id) {
    const auto narrow = static_cast<int32_t>(id);
    if (std::find(ids.begin(), ids.end(), narrow) == ids.end()) ids.push_back(narrow);
  };
  if (eos.is_array() && eos.size() <= 64) {
    for (const nlohmann::json& id : eos) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) {
        return absl::InvalidArgumentError("\"eos_token_id\" must hold token ids");
      }
      add(id.get<int64_t>());
    }
    return absl::OkStatus();
  }
  FieldReader in(json);
  if (const int one = in.whole("eos_token_id", -1, INT32_MAX, -1); one >= 0) add(one);
  return in.status();
}

absl::Status read_sizes(const nlohmann::json& json, ModelConfig& config) {
  const std::pair<const char*, int*> sizes[] = {
      {"hidden_size", &config.hidden_size},
      {"intermediate_size", &config.intermediate_size},
      {"num_hidden_layers", &config.num_layers},
      {"num_attention_heads", &config.num_heads},
      {"num_key_value_heads", &config.num_kv_heads},
      {"head_dim", &config.head_dim},
      {"vocab_size", &config.vocab_size},
      {"max_position_embeddings", &config.max_position_embeddings}};
  FieldReader in(json);
  for (const auto& [key, target] : sizes) *target = in.whole(key, 1, 1 << 24, 0);
  if (!in.status().ok()) return in.status();
  if (config.num_kv_heads == 0) {
    const int heads = silent_values(config.family).kv_heads;
    config.num_kv_heads = heads > 0 ? heads : config.num_heads;
  }
  if (config.head_dim == 0 && config.family == ModelFamily::kQwen3) config.head_dim = 128;
  if (config.head_dim == 0 && config.num_heads > 0) {
    config.head_dim = config.hidden_size / config.num_heads;
  }
  return absl::OkStatus();
}

absl::Status read_family(const nlohmann::json& json, ModelConfig& config) {
  FieldReader in(json);
  const std::string type = in.word("model_type", "");
  if (!in.status().ok()) return in.status();
  for (const auto& family : kFamilies) {
    if (type != family.type) continue;
    config.family = family.family;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("model_type \"", type,
                   "\" is not supported; this engine runs \"llama\", \"mistral\", \"qwen2\", "
                   "\"qwen3\", \"qwen3_moe\" and \"mixtral\""));
}

// Activations and biases. A family without a switch for its biases has no use for one.
absl::Status read_arithmetic(const nlohmann::json& json, ModelConfig& config) {
  FieldReader in(json);
  const std::string activation = in.word("hidden_act", "silu");
  const double part = in.number("partial_rotary_factor", 0.0, 1.0, 1.0);
  if (!in.status().ok()) return in.status();
  if (activation != "silu") {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_act \"", activation, "\" is not supported; only \"silu\" is"));
  }
  if (!member(json, "quantization_config").is_null()) {
    return absl::InvalidArgumentError(
        "quantization_config is not supported; weights must be F32, F16 or BF16");
  }
  if (part != 1.0) return absl::InvalidArgumentError("partial_rotary_factor is not supported");
  const ModelFamily family = config.family;
  const struct {
    const char* key;
    bool* target;
    bool allowed;
  } flags[] = {{"attention_bias", &config.attention_bias,
                family == ModelFamily::kLlama || config.has_qk_norm()},
               {"mlp_bias", &config.mlp_bias, family == ModelFamily::kLlama}};
  for (const auto& flag : flags) {
    *flag.target = in.flag(flag.key, false);
    if (*flag.target && !flag.allowed) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag.key, " is not supported with this model_type"));
    }
  }
  return in.status();
}

// "layer_types" says which layers have the window; older files of Qwen say from which layer on.
// Where there are experts all layers have it or none.
absl::Status read_windows(const nlohmann::json& json, ModelConfig& config) {
  const ModelFamily family = config.family;
  const bool by_layer = family == ModelFamily::kQwen2 || family == ModelFamily::kQwen3;
  const bool qwen = by_layer || family == ModelFamily::kQwen3Moe;
  const bool silent = !json.contains("sliding_window") &&
                      (family == ModelFamily::kMistral || family == ModelFamily::kQwen3Moe);
  FieldReader in(json);
  const int window = in.whole("sliding_window", 1, 1 << 24, silent ? 4096 : 0);
  const bool use = in.flag("use_sliding_window", !qwen);
  const int first = in.whole("max_window_layers", 0, 1 << 24, by_layer ? 28 : 0);
  if (!in.status().ok()) return in.status();
  if (config.family == ModelFamily::kLlama && window != 0) {
    return absl::InvalidArgumentError("sliding_window is not supported with model_type \"llama\"");
  }
  if (use) config.sliding_window = window;
  const nlohmann::json& types = member(json, "layer_types");
  if (!types.is_null() && (!types.is_array() || types.size() != size_t(config.num_layers))) {
    return absl::InvalidArgumentError("\"layer_types\" must hold one word for each layer");
  }
  for (int l = 0; l < config.num_layers; ++l) {
    bool slides = l >= first || config.may_have_experts();
    if (!types.is_null()) {
      const nlohmann::json& type = types[size_t(l)];
      slides = type == "sliding_attention";
      if (!slides && type != "full_attention") {
        return absl::InvalidArgumentError(
            absl::StrCat("layer type ", type.dump(-1, ' ', true, kReplace), " is not supported"));
      }
    }
    config.sliding_layers.push_back(slides);
  }
  const auto& layers = config.sliding_layers;
  const auto sliding = std::count(layers.begin(), layers.end(), true);
  if (sliding > 0 && config.sliding_window == 0 && !types.is_null()) {
    return absl::InvalidArgumentError("\"layer_types\" has sliding layers, but no sliding_window");
  }
  if (config.may_have_experts() && config.sliding_window > 0 && sliding < config.num_layers) {
    return absl::InvalidArgumentError(
        "\"layer_types\" with full_attention is not supported beside the window of this "
        "model_type");
  }
  if (sliding == 0) config.sliding_window = 0;
  if (config.sliding_window == 0 || sliding == config.num_layers) config.sliding_layers.clear();
  return absl::OkStatus();
}

// Writes no field if there is no window, except for Mistral, where a missing field would mean one.
void write_windows(const ModelConfig& config, nlohmann::ordered_json& json) {
  if (config.sliding_window == 0) {
    if (config.family == ModelFamily::kMistral) json["sliding_window"] = nullptr;
    return;
  }
  json["sliding_window"] = config.sliding_window;
  json["use_sliding_window"] = true;
  json["max_window_layers"] = 0;
  if (config.sliding_layers.empty()) return;
  nlohmann::ordered_json types = nlohmann::ordered_json::array();
  for (const bool slides : config.sliding_layers) {
    types.push_back(slides ? "sliding_attention" : "full_attention");
  }
  json["layer_types"] = std::move(types);
}

absl::StatusOr<ModelConfig> read_config(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("the top level must be an object");
  ModelConfig config;
  for (const auto read : {read_family, read_arithmetic, read_sizes, read_experts}) {
    if (absl::Status status = read(json, config); !status.ok()) return status;
  }
  const Silent silent = silent_values(config.family);
  FieldReader in(json);
  config.rms_norm_eps = in.number("rms_norm_eps", 0.0, 1.0, silent.eps);
  config.rope_theta = in.number("rope_theta", 1.0, 1e12, silent.theta);
  config.tie_word_embeddings = in.flag("tie_word_embeddings", false);
  config.bos_token_id = in.whole("bos_token_id", -1, INT32_MAX, -1);
  if (!in.status().ok()) return in.status();
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (absl::Status status = read_rope(member(json, key), config); !status.ok()) return status;
  }
  if (absl::Status status = read_eos(json, config); !status.ok()) return status;
  if (absl::Status status = config.validate(); !status.ok()) return status;
  if (absl::Status status = read_windows(json, config); !status.ok()) return status;
  return config;
}

}  // namespace

size_t ModelConfig::num_parameters() const {
  const size_t d = hidden_size, f = intermediate_size, v = vocab_size;
  const size_t q = size_t(num_heads) * head_dim, kv = size_t(num_kv_heads) * head_dim;
  const size_t biases =
      (has_qkv_bias() ? q + 2 * kv : 0) + (has_output_bias() ? d : 0) + (mlp_bias ? 2 * f + d : 0);
  const size_t head_norms = has_qk_norm() ? 2 * size_t(head_dim) : 0;
  const size_t layer = 2 * d + d * q * 2 + d * kv * 2 + biases + head_norms;
  size_t all = (tie_word_embeddings ? 1 : 2) * v * d + d + num_layers * layer;
  const size_t experts = size_t(num_experts) * (d + 3 * d * size_t(expert_size));  // and a router
  for (int l = 0; l < num_layers; ++l) all += has_experts(l) ? experts : 3 * d * f;
  return all;
}

KvGeometry ModelConfig::kv_geometry() const {
  return {.layers = num_layers, .kv_heads = num_kv_heads, .head_dim = head_dim};
}

absl::Status ModelConfig::validate() const {
  if (num_layers < 1 || num_layers > 1024) {
    return field_error("num_hidden_layers", num_layers, "between 1 and 1024");
  }
  if (hidden_size < 16 || hidden_size > (1 << 16) || hidden_size % 16 != 0) {
    return field_error("hidden_size", hidden_size, "a multiple of 16, at most 65536");
  }
  if (intermediate_size < 16 || intermediate_size > (1 << 18) || intermediate_size % 16 != 0) {
    return field_error("intermediate_size", intermediate_size, "a multiple of 16, at most 262144");
  }
  if (absl::Status status = check_experts(*this); !status.ok()) return status;
  if (num_heads < 1 || num_heads > 1024) {
    return field_error("num_attention_heads", num_heads, "between 1 and 1024");
  }
  if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
    return field_error("num_key_value_heads", num_kv_heads, "a divisor of num_attention_heads");
  }
  if (head_dim < 16 || head_dim > 256 || head_dim % 16 != 0) {
    return field_error("head_dim", head_dim, "a multiple of 16, at most 256");
  }
  if (vocab_size < 1 || vocab_size > (1 << 21)) {
    return field_error("vocab_size", vocab_size, "between 1 and 2097152");
  }
  if (max_position_embeddings < 1) {
    return field_error("max_position_embeddings", max_position_embeddings, "positive");
  }
  if (sliding_window < 0 ||
      (!sliding_layers.empty() && sliding_layers.size() != size_t(num_layers))) {
    return field_error("sliding_window", sliding_window, "positive, with a flag for each layer");
  }
  for (const int32_t id : eos_token_ids) {
    if (id < 0 || id >= vocab_size) return field_error("eos_token_id", id, "a token id");
  }
  if (bos_token_id >= vocab_size) return field_error("bos_token_id", bos_token_id, "a token id");
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> parse_model_config(std::string_view text) {
  auto json = parse_json(text, "config.json");
  if (!json.ok()) return json.status();
  auto config = read_config(*json);
  if (!config.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", config.status().message()));
  }
  return config;
}

absl::Status read_generation_config(std::string_view text, ModelConfig& config) {
  auto json = parse_json(text, "generation_config.json");
  if (!json.ok()) return json.status();
  ModelConfig with = config;
  absl::Status status = read_eos(*json, with);
  if (status.ok()) status = with.validate();
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("generation_config.json: ", status.message()));
  }
  config = std::move(with);
  return absl::OkStatus();
}

std::string model_config_to_json(const ModelConfig& config) {
  const auto& family = kFamilies[static_cast<size_t>(config.family)];
  nlohmann::ordered_json json = {{"architectures", {family.architecture}},
                                 {"model_type", family.type},
                                 {"hidden_size", config.hidden_size},
                                 {"intermediate_size", config.intermediate_size},
                                 {"num_hidden_layers", config.num_layers},
                                 {"num_attention_heads", config.num_heads},
                                 {"num_key_value_heads", config.num_kv_heads},
                                 {"head_dim", config.head_dim},
                                 {"vocab_size", config.vocab_size},
                                 {"max_position_embeddings", config.max_position_embeddings},
                                 {"hidden_act", "silu"},
                                 {"attention_bias", config.attention_bias},
                                 {"mlp_bias", config.mlp_bias},
                                 {"rms_norm_eps", config.rms_norm_eps},
                                 {"rope_theta", config.rope_theta},
                                 {"tie_word_embeddings", config.tie_word_embeddings},
                                 {"torch_dtype", "bfloat16"}};
  nlohmann::ordered_json rope = rope_to_json(config.rope_scaling);
  if (!rope.is_null()) json["rope_scaling"] = std::move(rope);
  write_windows(config, json);
  write_experts(config, json);
  if (config.bos_token_id >= 0) json["bos_token_id"] = config.bos_token_id;
  if (config.eos_token_ids.size() == 1) {
    json["eos_token_id"] = config.eos_token_ids[0];
  } else if (!config.eos_token_ids.empty()) {
    json["eos_token_id"] = config.eos_token_ids;
  }
  return json.dump(2) + "\n";
}

absl::Status check_shard(const ModelConfig& config, const ModelShard& shard) {
  if (shard.ranks < 1 || shard.rank < 0 || shard.rank >= shard.ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no rank ", shard.rank, " of ", shard.ranks));
  }
  if (config.num_kv_heads % shard.ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a tensor-parallel size of ", shard.ranks, " does not divide the model's ",
                     config.num_kv_heads, " KV heads: use one that does"));
  }
  if (shard.expert_parallel && (config.num_experts == 0 || config.num_experts % shard.ranks != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", config.num_experts, " experts, which ", shard.ranks,
                     " ranks cannot share evenly: leave out --enable-expert-parallel"));
  }
  return absl::OkStatus();
}

}  // namespace baton::engine
