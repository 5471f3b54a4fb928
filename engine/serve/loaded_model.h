// A model directory, ready to be served.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/model.h"
#include "engine/serve/requests/sampling.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::serve {

struct LoadedModel {
  std::string name;  // the directory's last part
  Model model;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;
  SamplingDefaults defaults;  // of generation_config.json, if there is one
};

// Of several ranks each loads its part. Errors name the missing or broken file and what a model
// directory must contain.
absl::StatusOr<LoadedModel> load_model(const std::string& directory,
                                       Arithmetic arithmetic = Arithmetic::kFp32,
                                       const ModelShard& shard = {});

}  // namespace baton::engine::serve
