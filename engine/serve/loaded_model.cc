// Loading a Hugging Face directory: weights and tokenizer.
#include "engine/serve/loaded_model.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/files/files.h"
#include "transport/base/log.h"

namespace baton::engine::serve {
namespace {

namespace fs = std::filesystem;

// Where the model that comes with Baton may be, best first.
std::vector<std::string> places_of_default_model() {
  const fs::path model = fs::path("models") / "kjv-1.8m";
  std::vector<std::string> places = {model.string()};
  std::error_code error;
  const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
  if (error) return places;
  const fs::path prefix = folder.parent_path();
  places.push_back((prefix / "share" / "baton" / model).string());
  places.push_back((prefix.parent_path() / model).string());
  return places;
}

absl::Status no_model(const std::string& directory) {
  const std::vector<std::string> places = places_of_default_model();
  const bool given = directory != places.front();
  return absl::NotFoundError(absl::StrCat("there is no model directory \"",
                                          given ? directory : absl::StrJoin(places, "\", nor \""),
                                          "\": give --model a directory with config.json, "
                                          "model.safetensors and tokenizer.json (`baton ",
                                          "train` writes such a one)"));
}

absl::StatusOr<Model> load_weights(const std::string& directory, Arithmetic arithmetic,
                                   const ModelShard& shard, const LoadOnDevice& on_device,
                                   std::unique_ptr<ModelRunner>* runner) {
  absl::StatusOr<Checkpoint> checkpoint = load_checkpoint(directory);
  if (!checkpoint.ok()) return checkpoint.status();
  for (const std::string& remark : checkpoint->remarks) {
    base::log_event(base::LogLevel::kWarning, "%s: %s", directory, remark);
  }
  if (on_device == nullptr) return Model::create(*std::move(checkpoint), arithmetic, shard);
  absl::StatusOr<OnDevice> loaded = on_device(*checkpoint);
  if (!loaded.ok()) return loaded.status();
  *runner = std::move(loaded->runner);
  return Model::describe(*checkpoint, loaded->arithmetic);
}

}  // namespace

std::string default_model() {
  const std::vector<std::string> places = places_of_default_model();
  std::error_code error;
  const auto there = std::find_if(places.begin(), places.end(), [&](const std::string& place) {
    return fs::is_directory(place, error);
  });
  return there == places.end() ? places.front() : *there;
}

absl::StatusOr<LoadedModel> load_model(const std::string& directory, Arithmetic arithmetic,
                                       const ModelShard& shard, const LoadOnDevice& on_device) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) return no_model(directory);
  std::unique_ptr<ModelRunner> runner;
  absl::StatusOr<Model> model = load_weights(directory, arithmetic, shard, on_device, &runner);
  if (!model.ok()) return model.status();
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  if (!tokenizer.ok()) return tokenizer.status();
  fs::path path = fs::absolute(directory, error).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  absl::StatusOr<std::optional<ChatTemplate>> chat_template =
      std::nullopt;  // the first rank alone has clients
  if (shard.rank == 0) chat_template = load_chat_template(directory);
  if (!chat_template.ok()) return chat_template.status();
  if (chat_template->has_value() && !(*chat_template)->status().ok()) {
    base::log_event(base::LogLevel::kWarning, "%s: chats are refused, completions still work",
                    (*chat_template)->status().message());
  }
  SamplingDefaults defaults;
  constexpr size_t kMaxBytes = size_t{1} << 20;
  if (const auto text = read_file(directory + "/generation_config.json", kMaxBytes); text.ok()) {
    const absl::StatusOr<SamplingDefaults> parsed = SamplingDefaults::parse(*text);
    if (!parsed.ok()) return parsed.status();
    defaults = *parsed;
  } else if (!absl::IsNotFound(text.status())) {
    return text.status();
  }
  return LoadedModel{path.filename().string(), *std::move(model),         std::move(runner),
                     *std::move(tokenizer),    *std::move(chat_template), defaults};
}

}  // namespace baton::engine::serve
