// Relays a worker's SSE stream: parses it, remembers tokens, rewrites events.
#include "engine/router/stream_relay.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::router {

using nlohmann::json;

StreamRelay::StreamRelay(json body, const http::ApiRequest& request,
                         std::function<bool(std::string_view)> send)
    : body_(std::move(body)), request_(request), send_(std::move(send)) {
  body_["stream"] = true;
  body_["stream_options"]["include_usage"] = true;
  body_["return_token_ids"] = true;
  // Whoever goes on with the stream has to draw the same numbers.
  if (!request.has_seed) body_["seed"] = std::random_device()();
  tokens_ = request.resume_tokens;
}

std::string StreamRelay::next_body(std::string_view prefill) {
  buffer_.clear();
  worker_error_ = absl::OkStatus();
  body_["kv_transfer_params"] = {{"prefill", prefill}, {"resume_token_ids", tokens_}};
  return body_.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool StreamRelay::receive(std::string_view bytes) {
  buffer_ += bytes;
  size_t begin = 0;
  bool good = true;
  for (size_t end; good && (end = buffer_.find("\n\n", begin)) != std::string::npos;) {
    const std::string_view event = std::string_view(buffer_).substr(begin, end - begin);
    begin = end + 2;
    if (event.starts_with("data: ")) good = handle(event.substr(6));
  }
  buffer_.erase(0, begin);
  return good;
}

bool StreamRelay::handle(std::string_view data) {
  if (data == "[DONE]") {
    if (!finished_) return true;
    if (request_.stream && !done_ && !send_(http::kSseDone)) client_gone_ = true;
    done_ = true;
    return !client_gone_;
  }
  absl::StatusOr<json> event = parse_json(data, "a worker's event");
  if (!event.ok()) {
    worker_error_ = event.status();
    return false;
  }
  if (const json& error = member(*event, "error"); !error.is_null()) {
    const auto message = string_field(error, "message", "");
    const auto code = int_field(error, "code", 0, 999, 500);
    const std::string text = message.ok() ? *message : "the worker failed";
    worker_error_ =
        code.ok() && *code < 500 ? absl::InvalidArgumentError(text) : absl::UnavailableError(text);
    return false;
  }
  return pass_on(*std::move(event));
}

bool StreamRelay::pass_on(json event) {
  const auto malformed = [this] {
    worker_error_ = absl::InvalidArgumentError("a worker sent an event that is not OpenAI's");
    return false;
  };
  if (!event.is_object()) return malformed();
  if (head_.is_null()) {
    for (const char* key : {"id", "created", "model"}) head_[key] = member(event, key);
  }
  event.update(head_);
  const json& choices = member(event, "choices");
  if (!choices.is_array() || choices.empty()) {                                 // the usage
    if (!std::exchange(usage_, member(event, "usage")).is_null()) return true;  // told already
    if (!request_.include_usage || !request_.stream) return true;
  } else {
    if (finished_) return true;  // a second worker only had the usage left to tell
    json& choice = event["choices"][0];
    if (!choice.is_object()) return malformed();
    for (const json& token : member(choice, "token_ids")) {
      if (token.is_number_integer()) tokens_.push_back(token.get<int32_t>());
    }
    if (!request_.return_token_ids) choice.erase("token_ids");
    const json& delta = request_.chat ? member(choice, "delta") : choice;
    if (begun_ && request_.chat && delta.is_object()) choice["delta"].erase("role");
    begun_ = true;
    const auto text = string_field(delta, request_.chat ? "content" : "text", "");
    if (text.ok()) text_ += *text;
    if (const json& logprobs = member(choice, "logprobs"); logprobs.is_object()) {
      for (const auto& [key, values] : logprobs.items()) {
        for (const json& value : values) logprobs_[key].push_back(value);
      }
    }
    const auto reason = string_field(choice, "finish_reason", "");
    if (reason.ok() && !reason->empty()) {
      finish_reason_ = *reason;
      finished_ = true;
    }
  }
  if (request_.stream && !send_(http::sse(event))) client_gone_ = true;
  return !client_gone_;
}

std::string StreamRelay::whole() const {
  json reply = head_;
  reply["object"] = request_.chat ? "chat.completion" : "text_completion";
  json choice = {{"index", 0}, {"finish_reason", finish_reason_}, {"logprobs", logprobs_}};
  if (request_.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text_}};
  } else {
    choice["text"] = text_;
  }
  if (request_.return_token_ids) {
    choice["token_ids"] = std::vector<int32_t>(
        tokens_.begin() + static_cast<ptrdiff_t>(request_.resume_tokens.size()), tokens_.end());
  }
  reply["choices"] = json::array({std::move(choice)});
  reply["usage"] = usage_;
  return reply.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace baton::engine::router
