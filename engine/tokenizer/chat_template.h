// A checkpoint's own way of writing a chat as a prompt: a Jinja template (third_party/minja).
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace baton::engine {

// Immutable; any number of threads may render at once. Copies share the template.
class ChatTemplate {
 public:
  // `bos` and `eos` are what the template knows as bos_token and eos_token. InvalidArgument with
  // the place of what is no Jinja.
  static absl::StatusOr<ChatTemplate> parse(const std::string& source, const std::string& bos,
                                            const std::string& eos);

  // `messages` is a list of objects with role and content. Ends where the answer begins, as
  // transformers' apply_chat_template does with add_generation_prompt. InvalidArgument with the
  // template's words where it refuses the chat (raise_exception), or cannot be rendered.
  absl::StatusOr<std::string> render(const nlohmann::ordered_json& messages) const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// That of a Hugging Face directory: chat_template.jinja, or "chat_template" of
// tokenizer_config.json (a string, or a list with one named "default"). Nothing if it has none.
absl::StatusOr<std::optional<ChatTemplate>> load_chat_template(const std::string& directory);

}  // namespace baton::engine
