// The replies of the OpenAI-compatible API: built from the engine's events, plain or streamed.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/http/openai/openai_request.h"
#include "engine/serve/requests/request.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::http {

// Builds the reply to one request, from the events of its choices: choice i is sample i % n of
// prompt i / n.
class ApiReply {
 public:
  // `tokenizer` must outlive the reply. `id`: what is unique about it, see
  // engine/http/request_check.h. `prompt_lengths`: in tokens, of request->prompts.
  ApiReply(std::shared_ptr<const ApiRequest> request, std::string model, std::string_view id,
           const Tokenizer& tokenizer, std::vector<size_t> prompt_lengths);

  // SSE events ("data: {...}\n\n") for one engine event; with the last of all choices, also the
  // usage if it was asked for and "data: [DONE]\n\n".
  std::string stream_event(size_t choice, const serve::OutputEvent& event);
  // Collects; the whole reply once all choices are finished().
  void add(size_t choice, const serve::OutputEvent& event);
  bool finished() const { return unfinished_ == 0; }
  std::string whole() const;

 private:
  struct Choice {
    bool begun = false;
    uint32_t tokens = 0;  // so far
    size_t offset = 0;    // of the next token's text in the answer's, in characters
    std::string text;
    std::vector<serve::TokenChoice> prompt;  // with echo and logprobs
    std::vector<serve::TokenChoice> tokens_made;
    serve::FinishReason reason = serve::FinishReason::kStop;
    serve::RequestMetrics metrics;
  };

  nlohmann::json envelope(const char* kind) const;
  void add_hand_off(nlohmann::json* reply) const;
  nlohmann::json usage() const;
  nlohmann::json usage_so_far(size_t choice) const;
  nlohmann::json logprobs_of(const std::vector<serve::TokenChoice>& choices, size_t offset,
                             bool with_prompt) const;
  nlohmann::json chat_logprobs(const std::vector<serve::TokenChoice>& choices) const;
  size_t characters(const std::vector<serve::TokenChoice>& choices) const;
  nlohmann::json token_logprob(int32_t token, double logprob) const;
  std::string token_text(int32_t token) const;
  std::string stream_chunk(size_t index, nlohmann::json choice) const;
  const std::string& prompt_of(size_t choice) const;
  void note(Choice* choice, const serve::OutputEvent& event);

  const std::shared_ptr<const ApiRequest> request_;
  const std::string model_;
  const std::string id_;
  const int64_t created_;
  const Tokenizer& tokenizer_;
  const std::vector<size_t> prompt_lengths_;
  std::vector<Choice> choices_;
  std::optional<kvtransfer::KvTransfer> handed_over_;
  size_t unfinished_;
};

// {"error": {"message", "type", "param", "code"}}, OpenAI's shape, and the HTTP status that fits.
// For an engine that has stopped for good the code is "engine_stopped" (engine/serve/liveness.h).
std::string api_error(const absl::Status& status);
std::string api_error(int http_status, std::string_view message);
// The status' code decides, or its payload of this name, a number.
inline constexpr char kHttpStatusPayload[] = "http_status";
int http_status(const absl::Status& status);
std::string sse(const nlohmann::json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace baton::engine::http
