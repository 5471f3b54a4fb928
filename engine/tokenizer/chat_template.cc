// Chat templates: where they are found, and what they know.
#include "engine/tokenizer/chat_template.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/files/utf8.h"
#include "engine/tokenizer/special_tokens.h"
#include "engine/tokenizer/template_process.h"

namespace baton::engine {
namespace {

constexpr size_t kLongestTemplate = size_t{16} << 20;

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

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character c = decode_character(text, at);
    if (!c.valid) return false;
    at += c.bytes;
  }
  return true;
}

absl::Status behind(const std::string& words, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(words, ": ", status.message()));
}

}  // namespace

struct ChatTemplate::Impl {
  absl::Status status;
  std::shared_ptr<TemplateProcess> process;
  std::string source;
  nlohmann::ordered_json tokens;
};

absl::StatusOr<ChatTemplate> ChatTemplate::parse(const std::string& source,
                                                 const nlohmann::ordered_json& tokens) {
  if (!is_utf8(source)) return absl::InvalidArgumentError("the chat template is not UTF-8");
  std::shared_ptr<TemplateProcess> process = TemplateProcess::shared();
  const absl::Status status = process->compile(source);
  if (absl::IsInvalidArgument(status)) return behind("the chat template is wrong", status);
  if (!status.ok()) return status;
  return ChatTemplate(
      std::make_shared<const Impl>(Impl{status, std::move(process), source, tokens}));
}

ChatTemplate ChatTemplate::refused(absl::Status why) {
  return ChatTemplate(std::make_shared<const Impl>(Impl{std::move(why), nullptr, {}, {}}));
}

absl::Status ChatTemplate::status() const { return impl_->status; }

absl::StatusOr<std::string> ChatTemplate::render(const nlohmann::ordered_json& messages,
                                                 const ChatOptions& options) const {
  if (!impl_->status.ok()) return impl_->status;
  nlohmann::ordered_json values = impl_->tokens;
  nlohmann::ordered_json& kept = values["messages"] = nlohmann::ordered_json::array();
  for (const nlohmann::ordered_json& message : messages) {
    nlohmann::ordered_json one = nlohmann::ordered_json::object();
    for (const auto& [name, value] : message.items()) {
      if (!value.is_null()) one[name] = value;
    }
    kept.push_back(std::move(one));
  }
  values["tools"] = options.tools;
  values["documents"] = nullptr;
  values["add_generation_prompt"] = options.add_generation_prompt;
  absl::StatusOr<std::string> text = impl_->process->render(impl_->source, values);
  if (text.ok()) return text;
  return behind("the model's chat template cannot render this chat", text.status());
}

absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory) {
  const absl::StatusOr<nlohmann::json> config =
      read_json_beside(directory, "tokenizer_config.json");
  if (!config.ok()) return config.status();
  const absl::StatusOr<SpecialTokens> tokens = load_special_tokens(directory);
  if (!tokens.ok()) return tokens.status();
  absl::StatusOr<std::string> source =
      read_file(directory + "/chat_template.jinja", kLongestTemplate);
  if (absl::IsNotFound(source.status())) {
    source = template_of(*config);
  } else if (!source.ok()) {
    return source.status();
  }
  if (source.ok() && source->empty()) return std::nullopt;
  absl::StatusOr<ChatTemplate> made =
      source.ok() ? ChatTemplate::parse(*source, tokens->named) : source.status();
  if (made.ok()) return *std::move(made);
  const bool for_good =
      absl::IsInvalidArgument(made.status()) || absl::IsFailedPrecondition(made.status());
  if (!for_good) return behind(directory, made.status());
  return ChatTemplate::refused(behind(directory, made.status()));
}

}  // namespace baton::engine
