// RopeScaling from and to Hugging Face config.json.
#include "engine/model/config_parts.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine {
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
