// Experts and rotary settings from and to config.json.
#include "engine/model/config_parts.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine {
namespace {

// Limit for all layers together. Each has three named weights, made before any file is read.
constexpr int kMaxExperts = 1 << 16;

// transformers writes either name for either family.
absl::Status read_count(const nlohmann::json& json, ModelConfig& config) {
  FieldReader in(json);
  const int all = in.whole("num_experts", 1, kMaxExperts, 0);
  const int local = in.whole("num_local_experts", 1, kMaxExperts, 0);
  if (all != 0 && local != 0 && all != local) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"num_experts\" is ", all, ", but \"num_local_experts\" is ", local));
  }
  config.num_experts = std::max(all, local);
  if (config.num_experts == 0) {
    config.num_experts = config.family == ModelFamily::kMixtral ? 8 : 128;
  }
  return in.status();
}

// A layer has experts if its number, counted from one, is a multiple of the step, and it is not in
// the list.
absl::Status read_dense_layers(const nlohmann::json& json, ModelConfig& config) {
  FieldReader in(json);
  const auto step = static_cast<size_t>(in.whole("decoder_sparse_step", 1, 1 << 24, 1));
  if (!in.status().ok()) return in.status();
  const auto layers = static_cast<size_t>(config.num_layers);
  std::vector<bool> dense(layers);
  for (size_t l = 0; l < layers; ++l) dense[l] = (l + 1) % step != 0;
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
  FieldReader in(json);
  config.experts_per_token = in.whole("num_experts_per_tok", 1, kMaxExperts, mixtral ? 2 : 8);
  if (mixtral) {
    config.expert_size = config.intermediate_size;
    config.norm_topk_prob = true;
    return in.status();
  }
  config.expert_size = in.whole("moe_intermediate_size", 1, 1 << 24, 768);
  config.norm_topk_prob = in.flag("norm_topk_prob", false);
  return in.status().ok() ? read_dense_layers(json, config) : in.status();
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
double yarn_attention_factor(FieldReader& in, double factor) {
  const double given = in.number("attention_factor", 1e-3, 1e3, 0.0);
  const double mscale = in.number("mscale", 0.0, 1e3, 0.0);
  const double all_dim = in.number("mscale_all_dim", 0.0, 1e3, 0.0);
  if (given > 0) return given;
  const auto scale = [factor](double by) {
    return factor <= 1 ? 1.0 : 0.1 * by * std::log(factor) + 1.0;
  };
  return mscale > 0 && all_dim > 0 ? scale(mscale) / scale(all_dim) : scale(1.0);
}

void read_yarn(FieldReader& in, RopeScaling& scaling) {
  scaling.kind = Kind::kYarn;
  scaling.beta_fast = in.number("beta_fast", 1e-3, 1e6, 32.0);
  scaling.beta_slow = in.number("beta_slow", 1e-3, 1e6, 1.0);
  scaling.truncate = in.flag("truncate", true);
  scaling.attention_factor = yarn_attention_factor(in, scaling.factor);
}

absl::Status read_llama3(FieldReader& in, RopeScaling& scaling) {
  scaling.kind = Kind::kLlama3;
  scaling.low_freq_factor = in.number("low_freq_factor", 1e-3, 1e6, 1.0);
  scaling.high_freq_factor = in.number("high_freq_factor", 1e-3, 1e6, 4.0);
  if (!in.status().ok() || scaling.high_freq_factor > scaling.low_freq_factor) return in.status();
  return absl::InvalidArgumentError("\"high_freq_factor\" must exceed \"low_freq_factor\"");
}

}  // namespace

absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config) {
  if (rope.is_null()) return absl::OkStatus();
  if (!rope.is_object()) return absl::InvalidArgumentError("\"rope_scaling\" must be an object");
  RopeScaling scaling;
  FieldReader in(rope);
  const double theta = in.number("rope_theta", 1.0, 1e12, config.rope_theta);
  const std::string type = in.word("rope_type", in.word("type", "default"));
  const bool yarn = type == "yarn";
  scaling.factor = in.number("factor", 1.0, 1e6, 1.0);
  const double part = in.number("partial_rotary_factor", 0.0, 1.0, 1.0);
  const double original = in.number("original_max_position_embeddings", 1, 1e9,
                                    yarn ? config.max_position_embeddings : 8192);
  if (!in.status().ok()) return in.status();
  if (part != 1.0) return absl::InvalidArgumentError("partial_rotary_factor is not supported");
  config.rope_theta = theta;
  scaling.original_max_position_embeddings = original;
  absl::Status status;
  if (type == "default" || type == "dynamic") {
    scaling = {};
  } else if (type == "linear") {
    scaling.kind = Kind::kLinear;
  } else if (type == "llama3") {
    status = read_llama3(in, scaling);
  } else if (yarn) {
    if (member(rope, "factor").is_null()) {
      scaling.factor = std::max(1.0, config.max_position_embeddings / original);
    }
    read_yarn(in, scaling);
    status = in.status();
  } else {
    status = absl::InvalidArgumentError(
        absl::StrCat("rope type \"", type,
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
