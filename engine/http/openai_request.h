// The requests of the OpenAI-compatible API, as the server and the router read them.
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

#include "absl/status/statusor.h"
#include "engine/serve/request.h"

namespace baton::engine::http {

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
  serve::SamplingParams sampling;
  bool has_seed = false;
};

// Parses a body of /v1/completions, or of /v1/chat/completions: then `prompt` is one line
// "role: content" per message and "assistant:" at the end. InvalidArgument names the field.
absl::StatusOr<ApiRequest> parse_api_request(std::string_view body, bool chat);
// The same from JSON that is parsed already.
absl::StatusOr<ApiRequest> read_api_request(const nlohmann::json& body, bool chat);

}  // namespace baton::engine::http
