// Fuzzes the bodies of HTTP requests, as completions and as chat: what is taken is within bounds,
// and what is refused is the client's fault and can be said in JSON.

#include "engine/http/openai/openai_reply.h"
#include "engine/http/openai/openai_request.h"
#include "tests/std.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  for (const bool chat : {false, true}) {
    const auto request = baton::engine::http::parse_api_request(body, chat);
    if (!request.ok()) {
      // The client is told which field: the reply must be text that JSON can carry.
      if (baton::engine::http::api_error(request.status()).empty()) std::abort();
      if (baton::engine::http::http_status(request.status()) / 100 != 4) std::abort();
      continue;
    }
    if (request->chat != chat || !request->sampling.validate().ok()) std::abort();
    if (request->prompts.empty() || request->choices() > baton::engine::http::kMaxChoices)
      std::abort();
    std::vector<std::vector<int32_t>> lists = {request->resume_tokens};
    for (const auto& prompt : request->prompts) lists.push_back(prompt.tokens);
    for (const auto& tokens : lists) {
      for (const int32_t token : tokens) {
        if (token < 0) std::abort();
      }
    }
  }
  return 0;
}
