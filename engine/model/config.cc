// ModelConfig from and to Hugging Face config.json.
#include "engine/model/config.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine {
namespace {

absl::Status field_error(const char* field, int value, const char* rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", field, " is ", value, "; it must be ", rule));
}

// Reads "rope_scaling" (or the newer "rope_parameters", which also holds rope_theta).
absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config) {
  if (rope.is_null()) return absl::OkStatus();
  if (!rope.is_object()) return absl::InvalidArgumentError("\"rope_scaling\" must be an object");
  auto theta = number_field(rope, "rope_theta", 1.0, 1e12, config.rope_theta);
  auto type = string_field(rope, "type", "default");
  if (type.ok()) type = string_field(rope, "rope_type", *type);
  auto factor = number_field(rope, "factor", 1.0, 1e6, 1.0);
  auto low = number_field(rope, "low_freq_factor", 1e-3, 1e6, 1.0);
  auto high = number_field(rope, "high_freq_factor", 1e-3, 1e6, 4.0);
  auto original = number_field(rope, "original_max_position_embeddings", 1, 1e9, 8192);
  for (const absl::Status& status : {theta.status(), type.status(), factor.status(), low.status(),
                                     high.status(), original.status()}) {
    if (!status.ok()) return status;
  }
  config.rope_theta = *theta;
  RopeScaling& scaling = config.rope_scaling;
  scaling.factor = *factor;
  if (*type == "default") {
    scaling.kind = RopeScaling::Kind::kNone;
  } else if (*type == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
  } else if (*type == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
    scaling.low_freq_factor = *low;
    scaling.high_freq_factor = *high;
    scaling.original_max_position_embeddings = *original;
    if (*high <= *low) {
      return absl::InvalidArgumentError("\"high_freq_factor\" must exceed \"low_freq_factor\"");
    }
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("rope type \"", *type, "\" is not supported (default, linear, llama3 are)"));
  }
  return absl::OkStatus();
}

absl::Status read_token_ids(const nlohmann::json& json, ModelConfig& config) {
  auto bos = int_field(json, "bos_token_id", -1, INT32_MAX, -1);
  if (!bos.ok()) return bos.status();
  config.bos_token_id = static_cast<int32_t>(*bos);
  const nlohmann::json& eos = member(json, "eos_token_id");
  if (eos.is_array() && eos.size() <= 64) {
    for (const nlohmann::json& id : eos) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) {
        return absl::InvalidArgumentError("\"eos_token_id\" must hold token ids");
      }
      config.eos_token_ids.push_back(static_cast<int32_t>(id.get<int64_t>()));
    }
    return absl::OkStatus();
  }
  auto one = int_field(json, "eos_token_id", -1, INT32_MAX, -1);
  if (!one.ok()) return one.status();
  if (*one >= 0) config.eos_token_ids.push_back(static_cast<int32_t>(*one));
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> read_config(const nlohmann::json& json) {
  if (!json.is_object()) return absl::InvalidArgumentError("the top level must be an object");
  auto type = string_field(json, "model_type", "");
  if (!type.ok()) return type.status();
  if (*type != "llama" && *type != "mistral") {
    return absl::InvalidArgumentError(
        absl::StrCat("model_type \"", *type, "\" is not supported; this engine runs \"llama\""));
  }
  auto activation = string_field(json, "hidden_act", "silu");
  if (!activation.ok()) return activation.status();
  if (*activation != "silu") {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_act \"", *activation, "\" is not supported; only \"silu\" is"));
  }
  for (const char* flag : {"attention_bias", "mlp_bias"}) {
    auto bias = bool_field(json, flag, false);
    if (!bias.ok()) return bias.status();
    if (*bias) return absl::InvalidArgumentError(absl::StrCat(flag, " is not supported"));
  }
  if (!member(json, "sliding_window").is_null()) {
    return absl::InvalidArgumentError("sliding_window is not supported");
  }

  ModelConfig config;
  const std::pair<const char*, int*> sizes[] = {
      {"hidden_size", &config.hidden_size},
      {"intermediate_size", &config.intermediate_size},
      {"num_hidden_layers", &config.num_layers},
      {"num_attention_heads", &config.num_heads},
      {"num_key_value_heads", &config.num_kv_heads},
      {"head_dim", &config.head_dim},
      {"vocab_size", &config.vocab_size},
      {"max_position_embeddings", &config.max_position_embeddings}};
  for (const auto& [key, target] : sizes) {
    auto value = int_field(json, key, 1, 1 << 24, 0);
    if (!value.ok()) return value.status();
    *target = static_cast<int>(*value);
  }
  if (config.num_kv_heads == 0) config.num_kv_heads = config.num_heads;
  if (config.head_dim == 0 && config.num_heads > 0) {
    config.head_dim = config.hidden_size / config.num_heads;
  }
  auto eps = number_field(json, "rms_norm_eps", 0.0, 1.0, 1e-6);
  if (!eps.ok()) return eps.status();
  config.rms_norm_eps = *eps;
  auto theta = number_field(json, "rope_theta", 1.0, 1e12, 10000.0);
  if (!theta.ok()) return theta.status();
  config.rope_theta = *theta;
  auto tied = bool_field(json, "tie_word_embeddings", false);
  if (!tied.ok()) return tied.status();
  config.tie_word_embeddings = *tied;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (absl::Status status = read_rope(member(json, key), config); !status.ok()) return status;
  }
  if (absl::Status status = read_token_ids(json, config); !status.ok()) return status;
  if (absl::Status status = config.validate(); !status.ok()) return status;
  return config;
}

}  // namespace

size_t ModelConfig::num_parameters() const {
  const size_t d = hidden_size, f = intermediate_size, v = vocab_size;
  const size_t q = size_t(num_heads) * head_dim, kv = size_t(num_kv_heads) * head_dim;
  const size_t layer = 2 * d + d * q * 2 + d * kv * 2 + 3 * d * f;
  return (tie_word_embeddings ? 1 : 2) * v * d + d + num_layers * layer;
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

std::string model_config_to_json(const ModelConfig& config) {
  nlohmann::ordered_json json = {{"architectures", {"LlamaForCausalLM"}},
                                 {"model_type", "llama"},
                                 {"hidden_size", config.hidden_size},
                                 {"intermediate_size", config.intermediate_size},
                                 {"num_hidden_layers", config.num_layers},
                                 {"num_attention_heads", config.num_heads},
                                 {"num_key_value_heads", config.num_kv_heads},
                                 {"head_dim", config.head_dim},
                                 {"vocab_size", config.vocab_size},
                                 {"max_position_embeddings", config.max_position_embeddings},
                                 {"hidden_act", "silu"},
                                 {"attention_bias", false},
                                 {"mlp_bias", false},
                                 {"rms_norm_eps", config.rms_norm_eps},
                                 {"rope_theta", config.rope_theta},
                                 {"tie_word_embeddings", config.tie_word_embeddings},
                                 {"torch_dtype", "bfloat16"}};
  const RopeScaling& scaling = config.rope_scaling;
  if (scaling.kind == RopeScaling::Kind::kLinear) {
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  } else if (scaling.kind == RopeScaling::Kind::kLlama3) {
    json["rope_scaling"] = {
        {"rope_type", "llama3"},
        {"factor", scaling.factor},
        {"low_freq_factor", scaling.low_freq_factor},
        {"high_freq_factor", scaling.high_freq_factor},
        {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
  }
  if (config.bos_token_id >= 0) json["bos_token_id"] = config.bos_token_id;
  if (config.eos_token_ids.size() == 1) {
    json["eos_token_id"] = config.eos_token_ids[0];
  } else if (!config.eos_token_ids.empty()) {
    json["eos_token_id"] = config.eos_token_ids;
  }
  return json.dump(2) + "\n";
}

}  // namespace baton::engine
