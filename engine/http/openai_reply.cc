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

std::string error_body(const char* type, json code, std::string_view message) {
  return dump({{"error",
                {{"message", std::string(message)},
                 {"type", type},
                 {"param", nullptr},
                 {"code", std::move(code)}}}});
}

}  // namespace

std::string sse(const json& value) { return absl::StrCat("data: ", dump(value), "\n\n"); }

int http_status(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:  // longer than the context
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kResourceExhausted:  // the queue is full
      return 429;
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
  const std::string_view message(status.message().data(), status.message().size());
  if (code != 404) return api_error(code, message);
  return error_body("invalid_request_error", "model_not_found", message);
}

std::string api_error(int http_status, std::string_view message) {
  switch (http_status) {
    case 401:
      return error_body("invalid_request_error", "invalid_api_key", message);
    case 429:
      return error_body("rate_limit_error", "overloaded", message);
    default:
      return error_body(http_status < 500 ? "invalid_request_error" : "server_error", nullptr,
                        message);
  }
}

ApiReply::ApiReply(std::shared_ptr<const ApiRequest> request, std::string model,
                   std::string_view id, const Tokenizer& tokenizer)
    : request_(std::move(request)),
      model_(std::move(model)),
      id_(absl::StrCat(request_->chat ? "chatcmpl-" : "cmpl-", std::string(id))),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      tokenizer_(tokenizer),
      choices_(request_->choices()),
      unfinished_(choices_.size()) {}

json ApiReply::envelope(const char* kind) const {
  return {{"id", id_}, {"object", kind}, {"created", created_}, {"model", model_}};
}

// Of what is known so far: a prompt counts once, however many choices it has.
json ApiReply::usage() const {
  uint32_t prompt_tokens = 0, cached = 0, loaded = 0, output = 0;
  json details = json::object();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const serve::RequestMetrics& metrics = choices_[i].metrics;
    if (i % static_cast<size_t>(request_->n) == 0) {
      prompt_tokens += metrics.prompt_tokens;
      cached += metrics.cached_tokens;
      loaded += metrics.loaded_tokens;
    }
    output += choices_[i].tokens;
    if (!metrics.load_error.ok()) details["kv_load_error"] = metrics.load_error.message();
  }
  output += static_cast<uint32_t>(request_->resume_tokens.size());
  details["cached_tokens"] = cached;
  details["kv_loaded_tokens"] = loaded;
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", output},
          {"total_tokens", prompt_tokens + output},
          {"prompt_tokens_details", std::move(details)}};
}

std::string ApiReply::token_text(int32_t token) const {
  return std::string(tokenizer_.token_bytes(token));
}

json ApiReply::token_logprob(int32_t token, double logprob) const {
  const std::string text = token_text(token);
  json bytes = json::array();
  for (const char byte : text) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", text}, {"logprob", logprob}, {"bytes", std::move(bytes)}};
}

json ApiReply::logprobs_of(const std::vector<serve::TokenChoice>& choices) const {
  if (!request_->logprobs) return nullptr;
  if (request_->chat) {
    json content = json::array();
    for (const serve::TokenChoice& choice : choices) {
      json entry = token_logprob(choice.token, choice.logprob);
      entry["top_logprobs"] = json::array();
      for (const auto& [token, logprob] : choice.top) {
        entry["top_logprobs"].push_back(token_logprob(token, logprob));
      }
      content.push_back(std::move(entry));
    }
    return {{"content", std::move(content)}};
  }
  json tokens = json::array(), values = json::array(), tops = json::array();
  for (const serve::TokenChoice& choice : choices) {
    json top = json::object();
    for (const auto& [token, logprob] : choice.top) top[token_text(token)] = logprob;
    tokens.push_back(token_text(choice.token));
    values.push_back(choice.logprob);
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)}};
}

void ApiReply::note(Choice* choice, const serve::OutputEvent& event) {
  choice->tokens += event.has_token ? 1 : 0;
  if (!event.finished) return;
  choice->reason = event.reason;
  choice->metrics = *event.metrics;
  --unfinished_;
}

std::string ApiReply::stream_chunk(json choice) const {
  json chunk = envelope(request_->chat ? "chat.completion.chunk" : "text_completion");
  chunk["choices"] = json::array({std::move(choice)});
  if (request_->include_usage) {
    chunk["usage"] = request_->continuous_usage ? usage() : json(nullptr);
  }
  return sse(chunk);
}

std::string ApiReply::stream_event(size_t index, const serve::OutputEvent& event) {
  if (event.finished && !event.status.ok()) {
    return absl::StrCat("data: ", api_error(event.status), "\n\n", std::string(kSseDone));
  }
  Choice& known = choices_[index];
  std::string out;
  json choice = {{"index", index}, {"finish_reason", nullptr}, {"logprobs", nullptr}};
  if (request_->chat && !std::exchange(known.begun, true)) {
    // Alone, for clients that skip the chunk with the role.
    json first = choice;
    first["delta"] = {{"role", "assistant"}, {"content", ""}};
    out = stream_chunk(std::move(first));
  }
  note(&known, event);
  if (event.has_token) choice["logprobs"] = logprobs_of({event.choice});
  if (request_->chat) {
    choice["delta"] = {{"content", event.text}};
  } else {
    choice["text"] = event.text;
  }
  if (request_->return_token_ids) {
    choice["token_ids"] = json::array();
    if (event.has_token) choice["token_ids"].push_back(event.choice.token);
  }
  if (event.finished) choice["finish_reason"] = serve::finish_reason_name(event.reason);
  out += stream_chunk(std::move(choice));
  if (!finished()) return out;
  if (request_->include_usage) {
    json last = envelope(request_->chat ? "chat.completion.chunk" : "text_completion");
    last["choices"] = json::array();
    last["usage"] = usage();
    out += sse(last);
  }
  return out.append(kSseDone);
}

void ApiReply::add(size_t index, const serve::OutputEvent& event) {
  Choice& choice = choices_[index];
  choice.text += event.text;
  if (event.has_token) choice.tokens_made.push_back(event.choice);
  note(&choice, event);
}

std::string ApiReply::whole() const {
  json reply = envelope(request_->chat ? "chat.completion" : "text_completion");
  json list = json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& made = choices_[i];
    json choice = {{"index", i},
                   {"finish_reason", serve::finish_reason_name(made.reason)},
                   {"logprobs", logprobs_of(made.tokens_made)}};
    if (request_->chat) {
      choice["message"] = {{"role", "assistant"}, {"content", made.text}};
    } else {
      choice["text"] = made.text;
    }
    if (request_->return_token_ids) {
      choice["token_ids"] = json::array();
      for (const serve::TokenChoice& token : made.tokens_made) {
        choice["token_ids"].push_back(token.token);
      }
    }
    list.push_back(std::move(choice));
  }
  reply["choices"] = std::move(list);
  reply["usage"] = usage();
  return dump(reply);
}

}  // namespace baton::engine::http
