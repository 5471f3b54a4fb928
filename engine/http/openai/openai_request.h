// The requests of the OpenAI-compatible API, as the server and the router read them.
//
// No field is ignored: what is not understood or not supported is refused by its name, unless its
// value asks for nothing (null, false, an empty list, one's default); so it is within messages and
// parts of their content. Besides OpenAI's fields:
// `top_k`, `min_p`, `repetition_penalty`,
// `stop_token_ids`, `min_tokens`, `ignore_eos`, `return_token_ids` (as vLLM) and
//   "kv_transfer_params": {"prefill": ADDRESS,         where the prompt's KV can be had
//                          "resume_token_ids": [...]}  output that the client has already
// or, as vLLM's servers have them (docs/vllm.md),
//                         {"do_remote_decode": true,     the prompt's KV is for another engine; the
//                          "transfer_id": ID}            answer has kv_transfer_params for that
//                         {"do_remote_prefill": true,    what such an answer has
//                          "transfer_id": ID, "remote_agent": NAME, "remote_address": HOST:PORT}
// All but "prefill" for requests with one choice.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/serve/requests/request.h"

namespace baton::engine::http {

// Text, or token ids where the client gave those.
struct ApiPrompt {
  std::string text;
  std::vector<int32_t> tokens;
};

struct ApiMessage {
  std::string role;
  std::string content;  // parts of type "text" are joined by a line end
  std::string name;     // the speaker's, for the chat template; "": none
};

struct ApiRequest {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // of a stream: a last chunk with the counts
  bool continuous_usage = false;  // ... and with every chunk those of its choice so far, as vLLM's
  bool return_token_ids = false;  // choices[].token_ids
  bool logprobs = false;
  std::string model;                 // "": whatever is served
  std::vector<ApiPrompt> prompts;    // at least one; of a chat, one, as render_chat() writes it
  std::vector<ApiMessage> messages;  // of a chat
  int n = 1;                         // choices per prompt
  bool echo = false;                 // the prompt is the beginning of the answer
  std::vector<int32_t> resume_tokens;
  std::string prefill_address;
  std::optional<kvtransfer::KvTransfer> remote_prefill;
  std::optional<std::string> hand_over;  // by this name; "": one is made up
  serve::SamplingParams sampling;  // a chat without a limit has INT32_MAX: to the context's end
  bool has_seed = false;

  // What is computed: choice i is of prompt i / n.
  size_t choices() const { return prompts.size() * static_cast<size_t>(n); }
};

// Choices of one request, at most.
inline constexpr size_t kMaxChoices = 128;

// Parses a body of /v1/completions, or of /v1/chat/completions. InvalidArgument names the field.
// Where it says nothing of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens,
// `defaults` has them, or OpenAI.
absl::StatusOr<ApiRequest> parse_api_request(std::string_view body, bool chat,
                                             const serve::SamplingDefaults& defaults = {});
// The same from JSON that is parsed already.
absl::StatusOr<ApiRequest> read_api_request(const nlohmann::json& body, bool chat,
                                            const serve::SamplingDefaults& defaults = {});

// Token ids: an array of whole numbers from 0 on. InvalidArgument with `what` otherwise.
absl::Status read_tokens(const nlohmann::json& value, const char* what, std::vector<int32_t>* out);

// A chat as a prompt for models without a chat template: a line "role: content" per message, or
// "role name: content" where it has one, and "assistant:" at the end.
std::string render_chat(const std::vector<ApiMessage>& messages);

// Choice j of every prompt draws by this seed: the first by the request's own.
uint64_t seed_of_choice(uint64_t seed, int j);

// Which fields a request and its messages may have, and which of them only with a value that asks
// for nothing. Internal to engine/http.

// InvalidArgument naming the first field that is unknown (with the nearest name) or not supported.
absl::Status check_api_fields(const nlohmann::json& body, bool chat);
// The same of /tokenize and /detokenize.
absl::Status check_tokenize_fields(const nlohmann::json& body);
absl::Status check_detokenize_fields(const nlohmann::json& body);
// The same of an object in `messages`, and of a part of type "text" in its content.
absl::Status check_message_fields(const nlohmann::json& message);
absl::Status check_part_fields(const nlohmann::json& part);

}  // namespace baton::engine::http
