// The replies of the OpenAI-compatible API: built from the engine's events, plain or streamed.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "engine/http/openai_request.h"
#include "engine/serve/request.h"
#include "engine/tokenizer/tokenizer.h"

namespace baton::engine::http {

// Builds the reply to one request, from its events.
class ApiReply {
 public:
  // `tokenizer` must outlive the reply.
  ApiReply(const ApiRequest& request, std::string model, uint64_t id, const Tokenizer& tokenizer);

  // One SSE event ("data: {...}\n\n") per engine event; with the last, also the usage if it was
  // asked for and "data: [DONE]\n\n".
  std::string stream_event(const serve::OutputEvent& event);
  // Collects; the whole reply once the last event is in.
  void add(const serve::OutputEvent& event);
  std::string whole() const;

 private:
  nlohmann::json envelope(const char* kind) const;
  nlohmann::json usage(const serve::RequestMetrics& metrics) const;
  nlohmann::json logprobs_of(const std::vector<serve::TokenChoice>& choices) const;
  std::string token_text(int32_t token) const;

  const ApiRequest request_;
  const std::string model_;
  const std::string id_;
  const int64_t created_;
  const Tokenizer& tokenizer_;
  bool first_ = true;
  std::string text_;
  std::vector<serve::TokenChoice> choices_;
  serve::FinishReason reason_ = serve::FinishReason::kStop;
  serve::RequestMetrics metrics_;
};

// {"error": {...}} and the HTTP status that fits.
std::string api_error(const absl::Status& status);
int http_status(const absl::Status& status);
std::string sse(const nlohmann::json& value);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";

}  // namespace baton::engine::http
