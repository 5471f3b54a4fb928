// A model directory, ready to be served.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::serve {

struct LoadedModel {
  std::string name;  // the directory's last part
  Model model;
  Tokenizer tokenizer;
  bool has_chat_template = false;  // of its own, in tokenizer_config.json or chat_template.jinja
};

// Errors name the missing or broken file and what a model directory must contain.
absl::StatusOr<LoadedModel> load_model(const std::string& directory);

}  // namespace baton::engine::serve
