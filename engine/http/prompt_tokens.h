// A request's prompts as the model's tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/openai/openai_request.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::http {

// A chat as a text: by the template, or as render_chat() writes it. InvalidArgument with the
// template's words where it refuses the chat.
absl::StatusOr<std::string> chat_text(const ApiRequest& chat,
                                      const std::optional<ChatTemplate>& chat_template);

// The tokens of every prompt. Token ids from the client are not checked. Errors as chat_text().
absl::StatusOr<std::vector<std::vector<int32_t>>> prompt_tokens(
    const ApiRequest& request, const Tokenizer& tokenizer,
    const std::optional<ChatTemplate>& chat_template);

// The text of these tokens including the names of special tokens, which Tokenizer::decode() leaves
// out: a client that sent their ids meant them.
std::string text_with_special(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens);

// Each token as tokenizer.json writes it, as transformers' convert_ids_to_tokens() does.
std::vector<std::string> token_names(const Tokenizer& tokenizer,
                                     const std::vector<int32_t>& tokens);

}  // namespace baton::engine::http
