// Experts and rotary settings of a config.json, in and out.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "engine/model/config.h"

namespace baton::engine {

// Reads how many experts there are, how wide, and which layers have them; nothing in a family
// without. `config` must have its family and sizes already.
absl::Status read_experts(const nlohmann::json& json, ModelConfig& config);

// Adds what read_experts() reads; nothing in a family without.
void write_experts(const ModelConfig& config, nlohmann::ordered_json& json);

// InvalidArgument naming the field that is out of range.
absl::Status check_experts(const ModelConfig& config);

// Reads "rope_scaling" or the newer "rope_parameters", which also holds rope_theta; null changes
// nothing. `config` must have its other fields already.
absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config);

// The value of "rope_scaling"; null where nothing is scaled.
nlohmann::ordered_json rope_to_json(const RopeScaling& scaling);

}  // namespace baton::engine
