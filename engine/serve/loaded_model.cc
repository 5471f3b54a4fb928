// Loading a Hugging Face directory: weights and tokenizer.
#include "engine/serve/loaded_model.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"

namespace baton::engine::serve {
namespace {

constexpr size_t kConfigBytes = size_t{16} << 20;

}  // namespace

absl::StatusOr<LoadedModel> load_model(const std::string& directory) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    return absl::NotFoundError(absl::StrCat(
        "there is no model directory \"", directory, "\": give --model a directory with ",
        "config.json, model.safetensors and tokenizer.json (`baton train` writes such a one)"));
  }
  absl::StatusOr<Model> model = Model::load(directory);
  if (!model.ok()) return model.status();
  absl::StatusOr<Tokenizer> tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  if (!tokenizer.ok()) return tokenizer.status();
  fs::path path = fs::absolute(directory, error).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  bool has_template = fs::exists(directory + "/chat_template.jinja", error);
  if (const auto text = read_file(directory + "/tokenizer_config.json", kConfigBytes); text.ok()) {
    const auto config = parse_json(*text, "tokenizer_config.json");
    if (!config.ok()) return config.status();
    has_template = has_template || !member(*config, "chat_template").is_null();
  }
  return LoadedModel{path.filename().string(), *std::move(model), *std::move(tokenizer),
                     has_template};
}

}  // namespace baton::engine::serve
