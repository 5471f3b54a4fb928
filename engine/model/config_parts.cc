// Experts and rotary settings from and to config.json.
#include "engine/model/config_parts.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine {
namespace {

// Limit for all layers together. Each has three named weights, made before any file is read.
constexpr int kMaxExperts = 1 << 16;

// transformers writes either name for either family.
absl::Status read_count(const nlohmann::json& json, ModelConfig& config) {
  int counts[2] = {};
  const char* const keys[2] = {"num_experts", "num_local_experts"};
  for (int i = 0; i < 2; ++i) {
    auto value = int_field(json, keys[i], 1, kMaxExperts, 0);
    if (!value.ok()) return value.status();
    counts[i] = static_cast<int>(*value);
  }
  if (counts[0] != 0 && counts[1] != 0 && counts[0] != counts[1]) {
    return absl::InvalidArgumentError(absl::StrCat("\"num_experts\" is ", counts[0],
                                                   ", but \"num_local_experts\" is ", counts[1]));
  }
  const int silent = config.family == ModelFamily::kMixtral ? 8 : 128;
  config.num_experts = std::max(counts[0], counts[1]);
  if (config.num_experts == 0) config.num_experts = silent;
  return absl::OkStatus();
}

// A layer has experts if its number, counted from one, is a multiple of the step, and it is not in
// the list.
absl::Status read_dense_layers(const nlohmann::json& json, ModelConfig& config) {
  auto step = int_field(json, "decoder_sparse_step", 1, 1 << 24, 1);
  if (!step.ok()) return step.status();
  const auto layers = static_cast<size_t>(config.num_layers);
  std::vector<bool> dense(layers);
  for (size_t l = 0; l < layers; ++l) dense[l] = (l + 1) % static_cast<size_t>(*step) != 0;
  const nlohmann::json& list = member(json, "mlp_only_layers");
  if (!list.is_null() && !list.is_array()) {
    return absl::InvalidArgumentError("\"mlp_only_layers\" must be a list of layers");
  }
  for (const nlohmann::json& layer : list) {
    if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= layers) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"mlp_only_layers\" must hold numbers of layers, which are less than ", layers));
    }
    dense[layer.get<size_t>()] = true;
  }
  if (std::count(dense.begin(), dense.end(), true) > 0) config.dense_layers = std::move(dense);
  return absl::OkStatus();
}

absl::Status bad_field(const char* field, int value, const std::string& rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("config: ", field, " is ", value, "; it must be ", rule));
}

}  // namespace

absl::Status read_experts(const nlohmann::json& json, ModelConfig& config) {
  if (!config.may_have_experts()) return absl::OkStatus();
  if (absl::Status status = read_count(json, config); !status.ok()) return status;
  const bool mixtral = config.family == ModelFamily::kMixtral;
  auto chosen = int_field(json, "num_experts_per_tok", 1, kMaxExperts, mixtral ? 2 : 8);
  if (!chosen.ok()) return chosen.status();
  config.experts_per_token = static_cast<int>(*chosen);
  if (mixtral) {
    config.expert_size = config.intermediate_size;
    config.norm_topk_prob = true;
    return absl::OkStatus();
  }
  auto width = int_field(json, "moe_intermediate_size", 1, 1 << 24, 768);
  auto normalise = bool_field(json, "norm_topk_prob", false);
  for (const absl::Status& status : {width.status(), normalise.status()}) {
    if (!status.ok()) return status;
  }
  config.expert_size = static_cast<int>(*width);
  config.norm_topk_prob = *normalise;
  return read_dense_layers(json, config);
}

void write_experts(const ModelConfig& config, nlohmann::ordered_json& json) {
  if (!config.may_have_experts()) return;
  json["num_experts_per_tok"] = config.experts_per_token;
  if (config.family == ModelFamily::kMixtral) {
    json["num_local_experts"] = config.num_experts;
    return;
  }
  json["num_experts"] = config.num_experts;
  json["moe_intermediate_size"] = config.expert_size;
  json["norm_topk_prob"] = config.norm_topk_prob;
  json["decoder_sparse_step"] = 1;
  nlohmann::ordered_json dense = nlohmann::ordered_json::array();
  for (int l = 0; l < config.num_layers; ++l) {
    if (!config.has_experts(l)) dense.push_back(l);
  }
  json["mlp_only_layers"] = std::move(dense);
}

absl::Status check_experts(const ModelConfig& config) {
  const int experts = config.num_experts, width = config.expert_size;
  if (!config.may_have_experts()) {
    if (experts == 0) return absl::OkStatus();
    return bad_field("num_experts", experts, "0 with this model_type");
  }
  if (experts < 1 || experts > kMaxExperts / config.num_layers) {
    return bad_field("num_experts", experts,
                     absl::StrCat("between 1 and ", kMaxExperts / config.num_layers, " in ",
                                  config.num_layers, " layers"));
  }
  if (config.experts_per_token < 1 || config.experts_per_token > experts) {
    return bad_field("num_experts_per_tok", config.experts_per_token,
                     absl::StrCat("between 1 and the ", experts, " experts"));
  }
  if (width < 16 || width > (1 << 18) || width % 16 != 0) {
    return bad_field("moe_intermediate_size", width, "a multiple of 16, at most 262144");
  }
  if (config.family == ModelFamily::kMixtral &&
      (width != config.intermediate_size || !config.norm_topk_prob ||
       !config.dense_layers.empty())) {
    return bad_field("intermediate_size", config.intermediate_size,
                     "the width of the experts, which all layers of a Mixtral have");
  }
  if (!config.dense_layers.empty() && config.dense_layers.size() != size_t(config.num_layers)) {
    return bad_field("mlp_only_layers", int(config.dense_layers.size()), "a flag for each layer");
  }
  return absl::OkStatus();
}

namespace {

using Kind = RopeScaling::Kind;

// The paper's factor on cosines and sines, which a file may replace or weigh.
absl::StatusOr<double> yarn_attention_factor(const nlohmann::json& rope, double factor) {
  auto given = number_field(rope, "attention_factor", 1e-3, 1e3, 0.0);
  auto mscale = number_field(rope, "mscale", 0.0, 1e3, 0.0);
  auto all_dim = number_field(rope, "mscale_all_dim", 0.0, 1e3, 0.0);
  for (const absl::Status& status : {given.status(), mscale.status(), all_dim.status()}) {
    if (!status.ok()) return status;
  }
  if (*given > 0) return *given;
  const auto scale = [factor](double by) {
    return factor <= 1 ? 1.0 : 0.1 * by * std::log(factor) + 1.0;
  };
  return *mscale > 0 && *all_dim > 0 ? scale(*mscale) / scale(*all_dim) : scale(1.0);
}

absl::Status read_yarn(const nlohmann::json& rope, RopeScaling& scaling) {
  auto fast = number_field(rope, "beta_fast", 1e-3, 1e6, 32.0);
  auto slow = number_field(rope, "beta_slow", 1e-3, 1e6, 1.0);
  auto truncate = bool_field(rope, "truncate", true);
  auto attention = yarn_attention_factor(rope, scaling.factor);
  for (const absl::Status& status :
       {fast.status(), slow.status(), truncate.status(), attention.status()}) {
    if (!status.ok()) return status;
  }
  scaling.kind = Kind::kYarn;
  scaling.beta_fast = *fast;
  scaling.beta_slow = *slow;
  scaling.truncate = *truncate;
  scaling.attention_factor = *attention;
  return absl::OkStatus();
}

absl::Status read_llama3(const nlohmann::json& rope, RopeScaling& scaling) {
  auto low = number_field(rope, "low_freq_factor", 1e-3, 1e6, 1.0);
  auto high = number_field(rope, "high_freq_factor", 1e-3, 1e6, 4.0);
  if (!low.ok()) return low.status();
  if (!high.ok()) return high.status();
  if (*high <= *low) {
    return absl::InvalidArgumentError("\"high_freq_factor\" must exceed \"low_freq_factor\"");
  }
  scaling.kind = Kind::kLlama3;
  scaling.low_freq_factor = *low;
  scaling.high_freq_factor = *high;
  return absl::OkStatus();
}

}  // namespace

absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config) {
  if (rope.is_null()) return absl::OkStatus();
  if (!rope.is_object()) return absl::InvalidArgumentError("\"rope_scaling\" must be an object");
  RopeScaling scaling;
  auto theta = number_field(rope, "rope_theta", 1.0, 1e12, config.rope_theta);
  auto type = string_field(rope, "type", "default");
  if (type.ok()) type = string_field(rope, "rope_type", *type);
  auto factor = number_field(rope, "factor", 1.0, 1e6, 1.0);
  auto part = number_field(rope, "partial_rotary_factor", 0.0, 1.0, 1.0);
  for (const absl::Status& status :
       {theta.status(), type.status(), factor.status(), part.status()}) {
    if (!status.ok()) return status;
  }
  if (*part != 1.0) return absl::InvalidArgumentError("partial_rotary_factor is not supported");
  const bool yarn = *type == "yarn";
  auto original = number_field(rope, "original_max_position_embeddings", 1, 1e9,
                               yarn ? config.max_position_embeddings : 8192);
  if (!original.ok()) return original.status();
  config.rope_theta = *theta;
  scaling.factor = *factor;
  scaling.original_max_position_embeddings = *original;
  absl::Status status;
  if (*type == "default" || *type == "dynamic") {
    scaling = {};
  } else if (*type == "linear") {
    scaling.kind = Kind::kLinear;
  } else if (*type == "llama3") {
    status = read_llama3(rope, scaling);
  } else if (yarn) {
    if (member(rope, "factor").is_null()) {
      scaling.factor = std::max(1.0, config.max_position_embeddings / *original);
    }
    status = read_yarn(rope, scaling);
  } else {
    status = absl::InvalidArgumentError(
        absl::StrCat("rope type \"", *type,
                     "\" is not supported (default, linear, dynamic, llama3 and yarn are)"));
  }
  config.rope_scaling = scaling;
  return status;
}

nlohmann::ordered_json rope_to_json(const RopeScaling& scaling) {
  const double original = scaling.original_max_position_embeddings;
  switch (scaling.kind) {
    case Kind::kNone:
      break;
    case Kind::kLinear:
      return {{"rope_type", "linear"}, {"factor", scaling.factor}};
    case Kind::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", scaling.factor},
              {"low_freq_factor", scaling.low_freq_factor},
              {"high_freq_factor", scaling.high_freq_factor},
              {"original_max_position_embeddings", original}};
    case Kind::kYarn:
      return {{"rope_type", "yarn"},
              {"factor", scaling.factor},
              {"original_max_position_embeddings", original},
              {"beta_fast", scaling.beta_fast},
              {"beta_slow", scaling.beta_slow},
              {"attention_factor", scaling.attention_factor},
              {"truncate", scaling.truncate}};
  }
  return nullptr;
}

}  // namespace baton::engine
