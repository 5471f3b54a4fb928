// A checkpoint's own way of writing a chat as a prompt: a Jinja template (template_process.h).
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace baton::engine {

// The inputs of a chat template besides the messages.
struct ChatOptions {
  bool add_generation_prompt = true;  // ends where the answer begins
  nlohmann::ordered_json tools;       // a list of JSON schemas; null: none
};

// Immutable; any number of threads may render at once. Copies share the template.
class ChatTemplate {
 public:
  // `tokens` is what the template knows by the names of special tokens: {"bos_token": "<s>"}.
  // InvalidArgument with the line of what is no Jinja; FailedPrecondition without Jinja2.
  static absl::StatusOr<ChatTemplate> parse(
      const std::string& source,
      const nlohmann::ordered_json& tokens = nlohmann::ordered_json::object());
  // A template that cannot render: render() returns this error.
  static ChatTemplate refused(absl::Status why);

  // `messages` is a list of objects with role and content. What transformers' apply_chat_template
  // writes, where null members are left out. InvalidArgument with the template's words where it
  // refuses the chat (raise_exception), or with what is wrong; other errors are of the process.
  absl::StatusOr<std::string> render(const nlohmann::ordered_json& messages,
                                     const ChatOptions& options = {}) const;
  // OK, or why no chat can be written.
  absl::Status status() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// The template of a Hugging Face directory: chat_template.jinja, or "chat_template" of
// tokenizer_config.json (a string, or a list with one named "default"). Nothing if it has none. A
// template that is invalid or not supported refuses every chat with its status(), so that
// completions, which need no template, still work. An error means that a file cannot be read.
absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory);

}  // namespace baton::engine
