// Applies the chat template and the tokenizer to a request's prompts.
#include "engine/http/prompt_tokens.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/token_text.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine::http {
namespace {

// A long text takes some 30 times its size until it is tokens.
absl::StatusOr<std::vector<int32_t>> encode(const Tokenizer& tokenizer, const std::string& text,
                                            const Tokenizer::EncodeOptions& options) {
  constexpr size_t kLong = 1 << 20, kTimes = 32;
  if (text.size() >= kLong) {
    absl::Status fits = base::memory_fits(
        absl::StrCat("a prompt of ", text.size(), " bytes: to make tokens of it, memory"),
        kTimes * text.size());
    if (!fits.ok()) return fits;
  }
  return tokenizer.encode(text, options);
}

}  // namespace

absl::StatusOr<std::string> chat_text(const ApiRequest& chat,
                                      const std::optional<ChatTemplate>& chat_template) {
  if (!chat_template.has_value()) return chat.prompts[0].text;
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  for (const ApiMessage& message : chat.messages) {
    nlohmann::ordered_json one = {{"role", message.role}, {"content", message.content}};
    if (!message.name.empty()) one["name"] = message.name;
    messages.push_back(std::move(one));
  }
  return chat_template->render(messages);
}

absl::StatusOr<std::vector<std::vector<int32_t>>> prompt_tokens(
    const ApiRequest& request, const Tokenizer& tokenizer,
    const std::optional<ChatTemplate>& chat_template) {
  std::vector<std::vector<int32_t>> prompts;
  if (request.chat && chat_template.has_value()) {
    const absl::StatusOr<std::string> text = chat_text(request, chat_template);
    if (!text.ok()) return text.status();
    // The template has written what begins a text, too.
    auto tokens = encode(tokenizer, *text, {.add_prefix = false});
    if (!tokens.ok()) return tokens.status();
    prompts.push_back(*std::move(tokens));
    return prompts;
  }
  for (const ApiPrompt& prompt : request.prompts) {
    prompts.push_back(prompt.tokens);
    if (!prompt.tokens.empty()) continue;
    auto tokens = encode(tokenizer, prompt.text, {});
    if (!tokens.ok()) return tokens.status();
    prompts.back() = *std::move(tokens);
  }
  return prompts;
}

std::string text_with_special(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
  std::string text;
  for (const int32_t token : tokens) text += tokenizer.token_bytes(token);
  if (tokenizer.spec().strip_space && text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::vector<std::string> token_names(const Tokenizer& tokenizer,
                                     const std::vector<int32_t>& tokens) {
  const TokenizerSpec& spec = tokenizer.spec();
  std::vector<bool> added(spec.tokens.size());
  for (const AddedToken& token : spec.added_tokens) added[static_cast<size_t>(token.id)] = true;
  std::vector<std::string> names;
  for (const int32_t token : tokens) {
    const auto id = static_cast<size_t>(token);
    const bool as_it_is = spec.byte_fallback || added[id];
    names.push_back(as_it_is ? spec.tokens[id] : ByteAlphabet::get().write(spec.tokens[id]));
  }
  return names;
}

}  // namespace baton::engine::http
