// The OpenAI-compatible requests and replies that the server and the router speak.
//
// Besides the usual fields: `top_k`, `ignore_eos`, `return_token_ids` (as vLLM) and
//   "kv_transfer_params": {"prefill": ADDRESS,         where the prompt's KV can be had
//                          "resume_token_ids": [...]}  output that the client has already
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/model/tokenizer.h"
#include "engine/serve/request.h"

namespace baton {

struct ApiRequest {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;     // of a stream: a last chunk with the counts
  bool return_token_ids = false;  // choices[0].token_ids
  bool logprobs = false;
  std::string prompt;  // text; empty if token ids were given
  std::vector<int32_t> prompt_tokens;
  std::vector<int32_t> resume_tokens;
  std::string prefill_address;
  SamplingParams sampling;
  bool has_seed = false;
};

// Parses a body of /v1/completions, or of /v1/chat/completions: then `prompt` is one line
// "role: content" per message and "assistant:" at the end. InvalidArgument names the field.
absl::StatusOr<ApiRequest> parse_api_request(std::string_view body, bool chat);
// The same from JSON that is parsed already.
absl::StatusOr<ApiRequest> read_api_request(const nlohmann::json& body, bool chat);

// Builds the reply to one request, from its events.
class ApiReply {
 public:
  // `tokenizer` must outlive the reply.
  ApiReply(const ApiRequest& request, std::string model, uint64_t id, const Tokenizer& tokenizer);

  // One SSE event ("data: {...}\n\n") per engine event; with the last, also the usage if it was
  // asked for and "data: [DONE]\n\n".
  std::string stream_event(const OutputEvent& event);
  // Collects; the whole reply once the last event is in.
  void add(const OutputEvent& event);
  std::string whole() const;

 private:
  nlohmann::json envelope(const char* kind) const;
  nlohmann::json usage(const RequestMetrics& metrics) const;
  nlohmann::json logprobs_of(const std::vector<TokenChoice>& choices) const;
  std::string token_text(int32_t token) const;

  const ApiRequest request_;
  const std::string model_;
  const std::string id_;
  const int64_t created_;
  const Tokenizer& tokenizer_;
  bool first_ = true;
  std::string text_;
  std::vector<TokenChoice> choices_;
  FinishReason reason_ = FinishReason::kStop;
  RequestMetrics metrics_;
};

// {"error": {...}} and the HTTP status that fits.
std::string api_error(const absl::Status& status);
int http_status(const absl::Status& status);
std::string sse(const nlohmann::json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace baton
