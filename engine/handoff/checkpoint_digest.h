// Which checkpoint an engine computes with, in words that engines of other makes can say too.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace baton::engine::handoff {

// SHA-256, in hexadecimal, over the files of weights (*.safetensors) of a model's folder, by name
// and content, and over its config.json: what checkpoint_digest() of python/baton/weights.py says
// of the same folder. Every byte is read, by up to eight threads. NotFound without these files.
absl::StatusOr<std::string> checkpoint_digest(const std::string& folder);

}  // namespace baton::engine::handoff
