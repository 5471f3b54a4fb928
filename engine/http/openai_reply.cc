// Builds replies, events of a stream and errors as JSON.
#include "engine/http/openai_reply.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace

std::string sse(const json& value) { return absl::StrCat("data: ", dump(value), "\n\n"); }

int http_status(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kResourceExhausted:  // longer than the context
      return 400;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kCancelled:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

std::string api_error(const absl::Status& status) {
  const int code = http_status(status);
  return dump({{"error",
                {{"message", std::string(status.message())},
                 {"type", code < 500 ? "invalid_request_error" : "server_error"},
                 {"code", code}}}});
}

ApiReply::ApiReply(const ApiRequest& request, std::string model, uint64_t id,
                   const Tokenizer& tokenizer)
    : request_(request),
      model_(std::move(model)),
      id_(absl::StrCat(request.chat ? "chatcmpl-" : "cmpl-", id)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      tokenizer_(tokenizer) {}

json ApiReply::envelope(const char* kind) const {
  return {{"id", id_}, {"object", kind}, {"created", created_}, {"model", model_}};
}

json ApiReply::usage(const serve::RequestMetrics& metrics) const {
  const uint64_t output = metrics.output_tokens + request_.resume_tokens.size();
  json prompt = {{"cached_tokens", metrics.cached_tokens},
                 {"kv_loaded_tokens", metrics.loaded_tokens}};
  if (!metrics.load_error.ok()) prompt["kv_load_error"] = metrics.load_error.message();
  return {{"prompt_tokens", metrics.prompt_tokens},
          {"completion_tokens", output},
          {"total_tokens", metrics.prompt_tokens + output},
          {"prompt_tokens_details", std::move(prompt)}};
}

std::string ApiReply::token_text(int32_t token) const {
  return std::string(tokenizer_.token_bytes(token));
}

json ApiReply::logprobs_of(const std::vector<serve::TokenChoice>& choices) const {
  if (!request_.logprobs) return nullptr;
  json content = json::array();
  json tokens = json::array(), values = json::array(), tops = json::array();
  for (const serve::TokenChoice& choice : choices) {
    json top = json::array();
    json top_map = json::object();
    for (const auto& [token, logprob] : choice.top) {
      top.push_back({{"token", token_text(token)}, {"logprob", logprob}});
      top_map[token_text(token)] = logprob;
    }
    content.push_back({{"token", token_text(choice.token)},
                       {"logprob", choice.logprob},
                       {"top_logprobs", std::move(top)}});
    tokens.push_back(token_text(choice.token));
    values.push_back(choice.logprob);
    tops.push_back(std::move(top_map));
  }
  if (request_.chat) return {{"content", std::move(content)}};
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)}};
}

std::string ApiReply::stream_event(const serve::OutputEvent& event) {
  if (event.finished && !event.status.ok()) {
    return absl::StrCat("data: ", api_error(event.status), "\n\n", std::string(kSseDone));
  }
  json chunk = envelope(request_.chat ? "chat.completion.chunk" : "text_completion");
  json choice = {{"index", 0}, {"finish_reason", nullptr}, {"logprobs", nullptr}};
  if (event.has_token && request_.logprobs) choice["logprobs"] = logprobs_of({event.choice});
  if (request_.chat) {
    choice["delta"] = {{"content", event.text}};
    if (first_) choice["delta"]["role"] = "assistant";
  } else {
    choice["text"] = event.text;
  }
  first_ = false;
  if (request_.return_token_ids) {
    choice["token_ids"] = json::array();
    if (event.has_token) choice["token_ids"].push_back(event.choice.token);
  }
  if (event.finished) choice["finish_reason"] = serve::finish_reason_name(event.reason);
  chunk["choices"] = json::array({std::move(choice)});
  std::string out = sse(chunk);
  if (!event.finished) return out;
  if (request_.include_usage) {
    json last = envelope(request_.chat ? "chat.completion.chunk" : "text_completion");
    last["choices"] = json::array();
    last["usage"] = usage(*event.metrics);
    out += sse(last);
  }
  return out.append(kSseDone);
}

void ApiReply::add(const serve::OutputEvent& event) {
  text_ += event.text;
  if (event.has_token) choices_.push_back(event.choice);
  if (!event.finished) return;
  reason_ = event.reason;
  metrics_ = *event.metrics;
}

std::string ApiReply::whole() const {
  json reply = envelope(request_.chat ? "chat.completion" : "text_completion");
  json choice = {{"index", 0},
                 {"finish_reason", serve::finish_reason_name(reason_)},
                 {"logprobs", logprobs_of(choices_)}};
  if (request_.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text_}};
  } else {
    choice["text"] = text_;
  }
  if (request_.return_token_ids) {
    choice["token_ids"] = json::array();
    for (const serve::TokenChoice& token : choices_) choice["token_ids"].push_back(token.token);
  }
  reply["choices"] = json::array({std::move(choice)});
  reply["usage"] = usage(metrics_);
  return dump(reply);
}

}  // namespace baton::engine::http
