// The tables of fields: read, harmless, and refused.
#include "engine/http/openai/openai_request.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "transport/base/nearest_name.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;

// Read by read_api_request().
constexpr std::array kRead = {"frequency_penalty",
                              "ignore_eos",
                              "kv_transfer_params",
                              "logit_bias",
                              "logprobs",
                              "max_tokens",
                              "min_p",
                              "min_tokens",
                              "model",
                              "n",
                              "presence_penalty",
                              "repetition_penalty",
                              "return_token_ids",
                              "seed",
                              "stop",
                              "stop_token_ids",
                              "stream",
                              "stream_options",
                              "temperature",
                              "top_k",
                              "top_p"};
constexpr std::array kReadOfCompletions = {"prompt", "echo", "best_of"};
constexpr std::array kReadOfChats = {"messages", "max_completion_tokens", "top_logprobs"};

// Say nothing about the answer.
constexpr std::array kHarmless = {
    "metadata", "priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier",
    "store",    "user"};

// The values that an unsupported field may have: null, an empty string, list or object, and this
// one.
struct Refused {
  const char* name;
  const char* neutral;  // JSON; nullptr: nothing else
};
constexpr std::array kRefused = {
    Refused{"add_generation_prompt", "true"},
    Refused{"add_special_tokens", "true"},
    Refused{"allowed_token_ids", nullptr},
    Refused{"audio", nullptr},
    Refused{"bad_words", nullptr},
    Refused{"chat_template", nullptr},
    Refused{"chat_template_kwargs", nullptr},
    Refused{"continue_final_message", "false"},
    Refused{"documents", nullptr},
    Refused{"function_call", R"("none")"},
    Refused{"functions", nullptr},
    Refused{"guided_choice", nullptr},
    Refused{"guided_grammar", nullptr},
    Refused{"guided_json", nullptr},
    Refused{"guided_regex", nullptr},
    Refused{"include_stop_str_in_output", "false"},
    Refused{"length_penalty", "1.0"},
    Refused{"mm_processor_kwargs", nullptr},
    Refused{"modalities", R"(["text"])"},
    Refused{"parallel_tool_calls", "true"},
    Refused{"prediction", nullptr},
    Refused{"prompt_logprobs", nullptr},
    Refused{"reasoning_effort", nullptr},
    Refused{"response_format", R"({"type":"text"})"},
    Refused{"return_tokens_as_token_ids", "false"},
    Refused{"skip_special_tokens", "true"},
    Refused{"spaces_between_special_tokens", "true"},
    Refused{"structured_outputs", nullptr},
    Refused{"suffix", nullptr},
    Refused{"tool_choice", R"("none")"},
    Refused{"tools", nullptr},
    Refused{"truncate_prompt_tokens", nullptr},
    Refused{"use_beam_search", "false"},
    Refused{"verbosity", R"("medium")"},
    Refused{"web_search_options", nullptr},
};

template <typename List>
bool contains(const List& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool is_empty(const json& value) {
  if (value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty())) {
    return true;
  }
  return (value.is_array() || value.is_object()) && value.empty();
}

bool asks_for_nothing(const json& value, const Refused& field) {
  return is_empty(value) || (field.neutral != nullptr && value == json::parse(field.neutral));
}

// Parts of an answer that clients send back have fields without meaning.
absl::Status check_inner_fields(const json& object, const std::vector<std::string>& read,
                                const char* what) {
  for (const auto& item : object.items()) {
    const std::string& name = item.key();
    if (contains(read, name) || is_empty(item.value())) continue;
    const std::string shown = name.substr(0, 64);
    return absl::InvalidArgumentError(absl::StrCat("\"", shown, "\" of ", what,
                                                   " is not supported here: leave it out",
                                                   base::did_you_mean(shown, read)));
  }
  return absl::OkStatus();
}

absl::Status check_fields(const json& body, const std::vector<std::string>& read,
                          const char* what) {
  if (!body.is_object()) return absl::InvalidArgumentError("the request body must be an object");
  for (const auto& item : body.items()) {
    const std::string& name = item.key();
    const json& value = item.value();
    if (contains(read, name) || contains(kHarmless, name)) continue;
    const auto refused = std::find_if(kRefused.begin(), kRefused.end(),
                                      [&](const Refused& field) { return name == field.name; });
    if (refused != kRefused.end()) {
      if (asks_for_nothing(value, *refused)) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", name, "\" is not supported here",
          refused->neutral != nullptr ? absl::StrCat(": leave it out, or say ", refused->neutral)
                                      : ": leave it out"));
    }
    if (value.is_null()) continue;
    return absl::InvalidArgumentError(absl::StrCat("there is no field \"", name.substr(0, 64),
                                                   "\" in a ", what, " request",
                                                   base::did_you_mean(name, read)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status check_api_fields(const json& body, bool chat) {
  std::vector<std::string> read(kRead.begin(), kRead.end());
  if (chat) {
    read.insert(read.end(), kReadOfChats.begin(), kReadOfChats.end());
  } else {
    read.insert(read.end(), kReadOfCompletions.begin(), kReadOfCompletions.end());
  }
  return check_fields(body, read, chat ? "chat" : "completion");
}

absl::Status check_tokenize_fields(const json& body) {
  return check_fields(
      body, {"add_special_tokens", "messages", "model", "prompt", "return_token_strs"}, "tokenize");
}

absl::Status check_detokenize_fields(const json& body) {
  return check_fields(body, {"model", "tokens"}, "detokenize");
}

absl::Status check_message_fields(const json& message) {
  return check_inner_fields(message, {"content", "name", "role"}, "a message");
}

absl::Status check_part_fields(const json& part) {
  return check_inner_fields(part, {"text", "type"}, "a part of a message's content");
}

}  // namespace baton::engine::http
