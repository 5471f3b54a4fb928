// Relays a worker's SSE stream: parses it, remembers tokens, rewrites events.
#include "engine/router/stream_relay.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/serve/liveness.h"

namespace baton::engine::router {

using nlohmann::json;

namespace {

std::string dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

bool says_nothing(const json& value) {
  return value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty()) ||
         (value.is_structured() && value.empty());
}

// A choice of an event has something of the answer, which may be more than text; of a chat's delta,
// more than whose turn it is.
bool has_news(const json& choice) {
  if (!member(choice, "token_ids").empty() || !says_nothing(member(choice, "text"))) return true;
  const json& delta = member(choice, "delta");
  if (!delta.is_object()) return false;
  for (const auto& [key, value] : delta.items()) {
    if (key != "role" && !says_nothing(value)) return true;
  }
  return false;
}

// The code of an error in a stream: its own, or the one that its type implies.
int code_of(const json& error) {
  const auto code = int_field(error, "code", 400, 599, 0);
  if (code.ok() && *code != 0) return static_cast<int>(*code);
  const auto type = string_field(error, "type", "server_error");
  const bool of_server = type.ok() && (*type == "server_error" || *type == "InternalServerError");
  return of_server ? 503 : 400;
}

// A prompt counts once, however many choices it has.
json sum_of_usage(const http::ApiRequest& request, const std::vector<const StreamRelay*>& choices) {
  if (choices.size() == 1) return choices[0]->usage();
  int64_t prompt = 0, output = 0;
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto count = [&](const char* key) {
      return int_field(choices[i]->usage(), key, 0, INT32_MAX, 0).value_or(0);
    };
    if (i % static_cast<size_t>(request.n) == 0) prompt += count("prompt_tokens");
    output += count("completion_tokens");
  }
  return {
      {"prompt_tokens", prompt}, {"completion_tokens", output}, {"total_tokens", prompt + output}};
}

}  // namespace

StreamRelay::StreamRelay(std::shared_ptr<const WorkerBody> body,
                         std::shared_ptr<const http::ApiRequest> request, size_t choice, Head head,
                         std::function<bool(std::string_view)> send)
    : body_(std::move(body)),
      request_(std::move(request)),
      choice_(choice),
      head_(std::move(head)),
      send_(std::move(send)),
      tokens_(request_->resume_tokens) {}

void StreamRelay::begin() {
  buffer_.clear();
  searched_ = 0;
  worker_error_ = absl::OkStatus();
}

void StreamRelay::start_over() {
  begin();
  tokens_ = request_->resume_tokens;
  usage_ = logprobs_ = nullptr;
  text_.clear();
  finish_reason_.clear();
  lacks_ids_ = begun_ = finished_ = false;
}

std::vector<http::SharedBytes> StreamRelay::next_body(std::string_view prefill) const {
  return body_->of_choice(choice_, prefill, tokens_);
}

bool StreamRelay::receive(std::string_view bytes) {
  buffer_ += bytes;
  size_t begin = 0;
  bool good = true;
  // Continues where the last search ended: an event may have many megabytes.
  size_t from = searched_ == 0 ? 0 : searched_ - 1;
  for (size_t end; good && (end = buffer_.find("\n\n", from)) != std::string::npos; from = begin) {
    const std::string_view event = std::string_view(buffer_).substr(begin, end - begin);
    begin = end + 2;
    if (event.starts_with("data: ")) good = handle(event.substr(6));
  }
  buffer_.erase(0, begin);
  searched_ = buffer_.size();
  return good;
}

bool StreamRelay::handle(std::string_view data) {
  if (data == "[DONE]") {
    done_ = finished_;
    return true;
  }
  absl::StatusOr<json> event = parse_json(data, "a worker's event");
  if (!event.ok()) {
    worker_error_ = error_of_worker(502, std::string(event.status().message()), "");
    return false;
  }
  if (const json& error = member(*event, "error"); !error.is_null()) {
    const auto message = string_field(error, "message", "");
    worker_error_ = error_of_worker(code_of(error), message.ok() ? *message : "the worker failed",
                                    string_field(error, "code", "").value_or(""));
    return false;
  }
  return pass_on(*std::move(event));
}

bool StreamRelay::pass_on(json event) {
  const auto malformed = [this] {
    worker_error_ = error_of_worker(502, "a worker sent an event that is not OpenAI's", "");
    return false;
  };
  if (!event.is_object()) return malformed();
  if (head_->is_null()) {
    for (const char* key : {"id", "created", "model"}) (*head_)[key] = member(event, key);
  }
  event.update(*head_);
  // Workers are asked for the usage in any case; chunks have it where the client asked for that.
  if (event.contains("usage") && !member(event, "choices").empty()) {
    if (!request_->include_usage) event.erase("usage");
    if (request_->include_usage && !request_->continuous_usage) event["usage"] = nullptr;
  }
  const json& choices = member(event, "choices");
  if (!choices.is_array() || choices.empty()) {
    if (usage_.is_null()) usage_ = member(event, "usage");
    return true;
  }
  if (finished_) return true;  // a second worker only had the usage left to tell
  json& choice = event["choices"][0];
  if (!choice.is_object()) return malformed();
  const size_t before = tokens_.size();
  for (const json& token : member(choice, "token_ids")) {
    if (token.is_number_integer()) tokens_.push_back(token.get<int32_t>());
  }
  const json& delta = request_->chat ? member(choice, "delta") : choice;
  const auto text = string_field(delta, request_->chat ? "content" : "text", "");
  const auto reason = string_field(choice, "finish_reason", "");
  const bool news = tokens_.size() > before || has_news(choice);
  if (news) ++news_;
  if (news && tokens_.size() == before) lacks_ids_ = true;
  // The role comes once, from the first worker.
  if (std::exchange(begun_, true) && request_->chat && !news && (!reason.ok() || reason->empty())) {
    return true;
  }
  if (!request_->return_token_ids) choice.erase("token_ids");
  choice["index"] = choice_;
  if (text.ok()) text_ += *text;
  if (const json& logprobs = member(choice, "logprobs"); logprobs.is_object()) {
    for (const auto& [key, values] : logprobs.items()) {
      for (const json& value : values) logprobs_[key].push_back(value);
    }
  }
  if (reason.ok() && !reason->empty()) {
    finish_reason_ = *reason;
    finished_ = true;
  }
  if (request_->stream && !send_(http::sse(event))) client_gone_ = true;
  return !client_gone_;
}

absl::Status error_of_worker(int code, const std::string& message, std::string_view said) {
  absl::Status error = code == 429   ? absl::ResourceExhaustedError(message)
                       : code == 404 ? absl::NotFoundError(message)
                       : code < 500  ? absl::InvalidArgumentError(message)
                                     : absl::UnavailableError(message);
  if (http::http_status(error) != code) {
    error.SetPayload(http::kHttpStatusPayload, absl::Cord(absl::StrCat(code)));
  }
  if (code == 503 && said == serve::kStoppedPayload) {
    error.SetPayload(serve::kStoppedPayload, absl::Cord());
  }
  return error;
}

json StreamRelay::choice() const {
  json choice = {{"index", choice_}, {"finish_reason", finish_reason_}, {"logprobs", nullptr}};
  if (request_->logprobs) choice["logprobs"] = logprobs_;
  if (request_->chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text_}};
  } else {
    choice["text"] = text_;
  }
  if (request_->return_token_ids) {
    choice["token_ids"] = std::vector<int32_t>(
        tokens_.begin() + static_cast<ptrdiff_t>(request_->resume_tokens.size()), tokens_.end());
  }
  return choice;
}

std::string end_of_stream(const http::ApiRequest& request, const StreamRelay::Head& head,
                          const std::vector<const StreamRelay*>& choices) {
  std::string out;
  if (request.include_usage) {
    json last = *head;
    last["object"] = request.chat ? "chat.completion.chunk" : "text_completion";
    last["choices"] = json::array();
    last["usage"] = sum_of_usage(request, choices);
    out = http::sse(last);
  }
  return out.append(http::kSseDone);
}

std::string whole_reply(const http::ApiRequest& request, const StreamRelay::Head& head,
                        const std::vector<const StreamRelay*>& choices) {
  json reply = *head;
  reply["object"] = request.chat ? "chat.completion" : "text_completion";
  reply["choices"] = json::array();
  for (const StreamRelay* choice : choices) reply["choices"].push_back(choice->choice());
  reply["usage"] = sum_of_usage(request, choices);
  return dump(reply);
}

}  // namespace baton::engine::router
