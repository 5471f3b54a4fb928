// Chat templates: where they are found, and rendering them by minja.
#include "engine/tokenizer/chat_template.h"

#include <chrono>
#include <ctime>
#include <exception>
#include <minja/minja.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"

namespace baton::engine {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;

// Today's date, for templates that tell the model.
minja::Value strftime_now(const std::shared_ptr<minja::Context>&, minja::ArgumentsValue& given) {
  given.expectArgs("strftime_now", {1, 1}, {0, 0});
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm local{};
  localtime_r(&now, &local);
  char text[256] = "";
  const std::string format = given.args[0].get<std::string>();
  return {std::string(text, std::strftime(text, sizeof text, format.c_str(), &local))};
}

// "bos_token" and the like: a string, or an object with the token's flags.
std::string token_text(const nlohmann::json& config, const char* key) {
  const nlohmann::json& token = member(config, key);
  const nlohmann::json& content = token.is_object() ? member(token, "content") : token;
  return content.is_string() ? content.get<std::string>() : std::string();
}

absl::StatusOr<std::string> template_of(const nlohmann::json& config) {
  const nlohmann::json& given = member(config, "chat_template");
  if (given.is_null()) return std::string();
  if (given.is_string()) return given.get<std::string>();
  if (given.is_array()) {
    for (const nlohmann::json& one : given) {
      const nlohmann::json& source = member(one, "template");
      if (member(one, "name") == "default" && source.is_string()) return source.get<std::string>();
    }
  }
  return absl::InvalidArgumentError(
      "tokenizer_config.json: \"chat_template\" is neither a string nor a list with one named "
      "\"default\"");
}

}  // namespace

struct ChatTemplate::Impl {
  std::shared_ptr<minja::TemplateNode> root;
  std::string bos, eos;
};

absl::StatusOr<ChatTemplate> ChatTemplate::parse(const std::string& source, const std::string& bos,
                                                 const std::string& eos) {
  try {
    auto impl = std::make_shared<Impl>();
    impl->root = minja::Parser::parse(
        source, {.trim_blocks = true, .lstrip_blocks = true, .keep_trailing_newline = false});
    impl->bos = bos;
    impl->eos = eos;
    return ChatTemplate(std::move(impl));
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("the chat template is wrong: ", error.what()));
  }
}

absl::StatusOr<std::string> ChatTemplate::render(const nlohmann::ordered_json& messages) const {
  try {
    const nlohmann::ordered_json values = {{"messages", messages},
                                           {"add_generation_prompt", true},
                                           {"bos_token", impl_->bos},
                                           {"eos_token", impl_->eos}};
    const auto context = minja::Context::make(minja::Value(values));
    context->set("strftime_now", minja::Value::callable(strftime_now));
    return impl_->root->render(context);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's chat template cannot render this chat: ", error.what()));
  }
}

absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory) {
  nlohmann::json config;
  if (const auto text = read_file(directory + "/tokenizer_config.json", kMostBytes); text.ok()) {
    auto parsed = parse_json(*text, "tokenizer_config.json");
    if (!parsed.ok()) return parsed.status();
    config = *std::move(parsed);
  } else if (!absl::IsNotFound(text.status())) {
    return text.status();
  }
  absl::StatusOr<std::string> source = read_file(directory + "/chat_template.jinja", kMostBytes);
  if (absl::IsNotFound(source.status())) source = template_of(config);
  if (!source.ok()) return source.status();
  if (source->empty()) return std::nullopt;
  auto made = ChatTemplate::parse(*source, token_text(config, "bos_token"),
                                  token_text(config, "eos_token"));
  if (!made.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(directory, ": ", made.status().message()));
  }
  return *std::move(made);
}

}  // namespace baton::engine
