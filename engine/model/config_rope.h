// Rotary settings of a config.json, in and out.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "engine/model/config.h"

namespace baton::engine {

// Reads "rope_scaling" or the newer "rope_parameters", which also holds rope_theta; null changes
// nothing. `config` must have its other fields already.
absl::Status read_rope(const nlohmann::json& rope, ModelConfig& config);

// The value of "rope_scaling"; null where nothing is scaled.
nlohmann::ordered_json rope_to_json(const RopeScaling& scaling);

}  // namespace baton::engine
