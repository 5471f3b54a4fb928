// A model directory, ready to be served.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model.h"
#include "engine/model/model_runner.h"
#include "engine/serve/requests/sampling.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::serve {

// Puts a checkpoint's weights where they are computed with, if that is not the CPU.
struct OnDevice {
  std::unique_ptr<ModelRunner> runner;
  std::string arithmetic;  // for Model::describe()
};
using LoadOnDevice = std::function<absl::StatusOr<OnDevice>(const Checkpoint&)>;

struct LoadedModel {
  std::string name;  // the directory's last part
  Model model;
  std::unique_ptr<ModelRunner> runner;  // null: the CPU's, of an engine

  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;
  SamplingDefaults defaults;  // of generation_config.json, if there is one
};

// The model that comes with Baton, for commands that were given no --model. The first of these that
// is there, or the first:
//   models/kjv-1.8m                                           in a source tree
//   PROGRAM's folder/../share/baton/models/kjv-1.8m           where `baton` is installed
//   PROGRAM's folder/../../models/kjv-1.8m                    built, and called from another folder
std::string default_model();

// With several ranks each loads its part; with `on_device` the model has no weights. Errors name
// the missing or broken file and what a model directory must contain.
absl::StatusOr<LoadedModel> load_model(const std::string& directory,
                                       Arithmetic arithmetic = Arithmetic::kFp32,
                                       const ModelShard& shard = {},
                                       const LoadOnDevice& on_device = nullptr);

}  // namespace baton::engine::serve
