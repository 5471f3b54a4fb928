// Builds replies, events of a stream and errors as JSON.
#include "engine/http/openai/openai_reply.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/serve/liveness.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Bytes that do not continue a character of UTF-8.
size_t characters_in(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string error_body(const char* type, json code, std::string_view message,
                       json param = nullptr) {
  return dump({{"error",
                {{"message", std::string(message)},
                 {"type", type},
                 {"param", std::move(param)},
                 {"code", std::move(code)}}}});
}

double milliseconds(Time time) {
  return std::round(std::chrono::duration<double, std::micro>(time).count()) / 1e3;
}

}  // namespace

std::string sse(const json& value) { return absl::StrCat("data: ", dump(value), "\n\n"); }

int http_status(const absl::Status& status) {
  if (const auto given = status.GetPayload(kHttpStatusPayload); given.has_value()) {
    int code = 0;
    if (absl::SimpleAtoi(std::string(*given), &code)) return code;
  }
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
  if (status.GetPayload(serve::kStoppedPayload).has_value()) {
    return error_body("server_error", serve::kStoppedPayload, message);
  }
  if (code != 404) return api_error(code, message);
  return error_body("invalid_request_error", "model_not_found", message, "model");
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
                   std::string_view id, const Tokenizer& tokenizer,
                   std::vector<size_t> prompt_lengths)
    : request_(std::move(request)),
      model_(std::move(model)),
      id_(absl::StrCat(request_->chat ? "chatcmpl-" : "cmpl-", std::string(id))),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()),
      tokenizer_(tokenizer),
      prompt_lengths_(std::move(prompt_lengths)),
      choices_(request_->choices()),
      unfinished_(choices_.size()) {
  size_t offset = 0;
  for (const int32_t token : request_->resume_tokens) offset += characters_in(token_text(token));
  for (size_t i = 0; i < choices_.size(); ++i) {
    // The answer's text begins with the prompt's: with logprobs, token by token.
    const bool behind_prompt = request_->echo && !request_->resume_tokens.empty();
    choices_[i].offset = offset + (behind_prompt ? characters_in(prompt_of(i)) : 0);
  }
}

json ApiReply::envelope(const char* kind) const {
  return {{"id", id_}, {"object", kind}, {"created", created_}, {"model", model_}};
}

// What decode is to be told, as a vLLM server with the connector baton.vllm says it.
void ApiReply::add_hand_off(json* reply) const {
  if (!handed_over_.has_value()) return;
  (*reply)["kv_transfer_params"] = {{"do_remote_prefill", true},
                                    {"do_remote_decode", false},
                                    {"transfer_id", handed_over_->transfer},
                                    {"remote_agent", handed_over_->agent},
                                    {"remote_address", handed_over_->address},
                                    {"tp_size", handed_over_->ranks},
                                    {"remote_finished", true}};
}

// Usage so far: a prompt counts once, however many choices it has.
json ApiReply::usage() const {
  uint32_t prompt_tokens = 0, cached = 0, loaded = 0, output = 0;
  Time queued{}, kv_wait{};  // of the choice that waited longest
  json details = json::object();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const serve::RequestMetrics& metrics = choices_[i].metrics;
    if (i % static_cast<size_t>(request_->n) == 0) {
      prompt_tokens += metrics.prompt_tokens;
      cached += metrics.cached_tokens;
      loaded += metrics.loaded_tokens;
    }
    output += choices_[i].tokens;
    queued = std::max(queued, metrics.queued());
    kv_wait = std::max(kv_wait, metrics.kv_wait);
    if (!metrics.load_error.ok()) details["kv_load_error"] = metrics.load_error.message();
  }
  output += static_cast<uint32_t>(request_->resume_tokens.size());
  details["cached_tokens"] = cached;
  details["kv_loaded_tokens"] = loaded;
  details["queued_ms"] = milliseconds(queued);
  details["kv_wait_ms"] = milliseconds(kv_wait);
  return {{"prompt_tokens", prompt_tokens},
          {"completion_tokens", output},
          {"total_tokens", prompt_tokens + output},
          {"prompt_tokens_details", std::move(details)}};
}

// Usage of one choice, as vLLM counts in its chunks. Cached tokens are known only at the end.
json ApiReply::usage_so_far(size_t choice) const {
  const size_t prompt = prompt_lengths_[choice / static_cast<size_t>(request_->n)];
  const size_t output = choices_[choice].tokens + request_->resume_tokens.size();
  return {
      {"prompt_tokens", prompt}, {"completion_tokens", output}, {"total_tokens", prompt + output}};
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

json ApiReply::chat_logprobs(const std::vector<serve::TokenChoice>& choices) const {
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

// `with_prompt`: the first of them begins the prompt, so that nothing says how likely it was.
json ApiReply::logprobs_of(const std::vector<serve::TokenChoice>& choices, size_t offset,
                           bool with_prompt) const {
  if (!request_->logprobs) return nullptr;
  if (request_->chat) return chat_logprobs(choices);
  json tokens = json::array(), values = json::array(), tops = json::array();
  json offsets = json::array();
  for (const serve::TokenChoice& choice : choices) {
    std::string text = token_text(choice.token);
    offsets.push_back(offset);
    offset += characters_in(text);
    tokens.push_back(std::move(text));
    if (std::exchange(with_prompt, false)) {
      values.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    // Several tokens may read alike, such as halves of a character: the likeliest has the name.
    json top = json::object();
    for (const auto& [token, logprob] : choice.top) top.emplace(token_text(token), logprob);
    top.emplace(tokens.back().get<std::string>(), choice.logprob);
    values.push_back(choice.logprob);
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

size_t ApiReply::characters(const std::vector<serve::TokenChoice>& choices) const {
  size_t count = 0;
  for (const serve::TokenChoice& choice : choices) count += characters_in(token_text(choice.token));
  return count;
}

const std::string& ApiReply::prompt_of(size_t choice) const {
  return request_->prompts[choice / static_cast<size_t>(request_->n)].text;
}

void ApiReply::note(Choice* choice, const serve::OutputEvent& event) {
  choice->tokens += event.has_token ? 1 : 0;
  if (!event.finished) return;
  choice->reason = event.reason;
  choice->metrics = *event.metrics;
  if (event.handed_over.has_value()) handed_over_ = event.handed_over;
  --unfinished_;
}

std::string ApiReply::stream_chunk(size_t index, json choice) const {
  json chunk = envelope(request_->chat ? "chat.completion.chunk" : "text_completion");
  chunk["choices"] = json::array({std::move(choice)});
  if (request_->include_usage) {
    chunk["usage"] = request_->continuous_usage ? usage_so_far(index) : json(nullptr);
  }
  add_hand_off(&chunk);  // known with the last token
  return sse(chunk);
}

std::string ApiReply::stream_event(size_t index, const serve::OutputEvent& event) {
  if (event.finished && !event.status.ok()) {
    return absl::StrCat("data: ", api_error(event.status), "\n\n", std::string(kSseDone));
  }
  Choice& known = choices_[index];
  std::string out;
  json choice = {{"index", index}, {"finish_reason", nullptr}, {"logprobs", nullptr}};
  const bool first = !std::exchange(known.begun, true);
  // Whoever resumes a stream has had the prompt.
  const bool echoes = request_->echo && request_->resume_tokens.empty();
  if (request_->chat && first) {
    // Alone, for clients that skip the chunk with the role.
    json role = choice;
    role["delta"] = {{"role", "assistant"}, {"content", ""}};
    out = stream_chunk(index, std::move(role));
  }
  note(&known, event);
  std::vector<serve::TokenChoice> made;
  if (event.prompt != nullptr) made = *event.prompt;
  if (event.has_token) made.push_back(event.choice);
  if (!made.empty()) {
    choice["logprobs"] = logprobs_of(made, known.offset, event.prompt != nullptr);
    known.offset += characters(made);
  }
  if (request_->chat) {
    choice["delta"] = {{"content", event.text}};
  } else {
    choice["text"] = first && echoes ? absl::StrCat(prompt_of(index), event.text) : event.text;
  }
  if (request_->return_token_ids) {
    choice["token_ids"] = json::array();
    if (event.has_token) choice["token_ids"].push_back(event.choice.token);
  }
  if (event.finished) choice["finish_reason"] = serve::finish_reason_name(event.reason);
  out += stream_chunk(index, std::move(choice));
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
  if (event.prompt != nullptr) choice.prompt = *event.prompt;
  if (event.has_token) choice.tokens_made.push_back(event.choice);
  note(&choice, event);
}

std::string ApiReply::whole() const {
  json reply = envelope(request_->chat ? "chat.completion" : "text_completion");
  json list = json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& made = choices_[i];
    std::vector<serve::TokenChoice> tokens = made.prompt;
    tokens.insert(tokens.end(), made.tokens_made.begin(), made.tokens_made.end());
    json choice = {{"index", i},
                   {"finish_reason", serve::finish_reason_name(made.reason)},
                   {"logprobs", logprobs_of(tokens, 0, !made.prompt.empty())}};
    if (request_->chat) {
      choice["message"] = {{"role", "assistant"}, {"content", made.text}};
    } else {
      choice["text"] = request_->echo ? absl::StrCat(prompt_of(i), made.text) : made.text;
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
  add_hand_off(&reply);
  return dump(reply);
}

}  // namespace baton::engine::http
