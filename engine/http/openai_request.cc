// Parses requests; nothing in them is trusted.
#include "engine/http/openai_request.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;

absl::Status read_tokens(const json& value, const char* what, std::vector<int32_t>* out) {
  for (const json& token : value) {
    if (!token.is_number_integer() || token < 0 || token > INT32_MAX) {
      return absl::InvalidArgumentError(absl::StrCat(what, " must be an array of token ids"));
    }
    out->push_back(token.get<int32_t>());
  }
  return absl::OkStatus();
}

absl::Status read_prompt(const json& body, ApiRequest* request) {
  const json* prompt = &member(body, "prompt");
  if (prompt->is_array() && prompt->size() == 1 && !(*prompt)[0].is_number()) {
    prompt = &(*prompt)[0];
  }
  if (prompt->is_string()) {
    request->prompt = prompt->get<std::string>();
    return absl::OkStatus();
  }
  if (prompt->is_array() && !prompt->empty()) {
    return read_tokens(*prompt, "prompt", &request->prompt_tokens);
  }
  return absl::InvalidArgumentError("prompt must be a string or an array of token ids");
}

absl::Status read_messages(const json& body, ApiRequest* request) {
  const json& messages = member(body, "messages");
  if (!messages.is_array() || messages.empty()) {
    return absl::InvalidArgumentError("messages must be an array with at least one message");
  }
  for (const json& message : messages) {
    const absl::StatusOr<std::string> role = string_field(message, "role", "");
    const absl::StatusOr<std::string> content = string_field(message, "content", "");
    if (!role.ok() || !content.ok() || role->empty()) {
      return absl::InvalidArgumentError("every message needs a role and a content, both strings");
    }
    absl::StrAppend(&request->prompt, *role, ": ", *content, "\n");
  }
  absl::StrAppend(&request->prompt, "assistant:");
  return absl::OkStatus();
}

absl::Status read_stop(const json& body, serve::SamplingParams* sampling) {
  const json& stop = member(body, "stop");
  if (stop.is_null()) return absl::OkStatus();
  const json list = stop.is_array() ? stop : json::array({stop});
  for (const json& text : list) {
    if (!text.is_string()) {
      return absl::InvalidArgumentError("stop must be a string or an array of strings");
    }
    sampling->stop.push_back(text.get<std::string>());
  }
  return absl::OkStatus();
}

// Reads many fields, keeps the first error.
class Fields {
 public:
  explicit Fields(const json& body) : body_(body) {}
  const absl::Status& status() const { return status_; }
  void keep(const absl::Status& status) { status_.Update(status); }

  template <typename Out>
  void integer(const char* key, int64_t low, int64_t high, Out* out) {
    take(int_field(body_, key, low, high, static_cast<int64_t>(*out)), out);
  }
  void number(const char* key, double low, double high, double* out) {
    take(number_field(body_, key, low, high, *out), out);
  }
  void boolean(const char* key, bool* out) { take(bool_field(body_, key, *out), out); }
  bool has(const char* key) const { return !member(body_, key).is_null(); }

 private:
  template <typename Value, typename Out>
  void take(const absl::StatusOr<Value>& value, Out* out) {
    if (value.ok()) *out = static_cast<Out>(*value);
    status_.Update(value.status());
  }
  const json& body_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<ApiRequest> parse_api_request(std::string_view body, bool chat) {
  const absl::StatusOr<json> parsed = parse_json(body, "the request body");
  if (!parsed.ok()) return parsed.status();
  return read_api_request(*parsed, chat);
}

absl::StatusOr<ApiRequest> read_api_request(const json& body, bool chat) {
  if (!body.is_object()) return absl::InvalidArgumentError("the request body must be an object");
  ApiRequest request;
  request.chat = chat;
  serve::SamplingParams& sampling = request.sampling;
  sampling.temperature = 1.0;
  Fields fields(body);
  fields.keep(chat ? read_messages(body, &request) : read_prompt(body, &request));
  fields.keep(read_stop(body, &sampling));
  if (chat && fields.has("max_completion_tokens")) {
    fields.integer("max_completion_tokens", 1, INT32_MAX, &sampling.max_tokens);
  } else {
    fields.integer("max_tokens", 1, INT32_MAX, &sampling.max_tokens);
  }
  fields.number("temperature", 0, 100, &sampling.temperature);
  fields.number("top_p", 0, 1, &sampling.top_p);
  int64_t top_k = 0;
  fields.integer("top_k", -1, INT32_MAX, &top_k);  // vLLM's clients write -1 for "all"
  sampling.top_k = top_k < 0 ? 0 : static_cast<int>(top_k);
  request.has_seed = fields.has("seed");
  int64_t seed = 0;
  fields.integer("seed", INT64_MIN, INT64_MAX, &seed);
  sampling.seed = static_cast<uint64_t>(seed);
  fields.boolean("ignore_eos", &sampling.ignore_eos);
  fields.boolean("stream", &request.stream);
  fields.boolean("return_token_ids", &request.return_token_ids);
  if (chat) {
    fields.boolean("logprobs", &request.logprobs);
    sampling.logprobs = request.logprobs ? 0 : -1;
    if (request.logprobs) fields.integer("top_logprobs", 0, 20, &sampling.logprobs);
  } else {
    fields.integer("logprobs", 0, 20, &sampling.logprobs);
    request.logprobs = sampling.logprobs >= 0;
  }
  int64_t n = 1;
  fields.integer("n", 1, 1, &n);
  bool echo = false;
  fields.boolean("echo", &echo);
  if (echo) fields.keep(absl::InvalidArgumentError("echo is not supported"));

  if (const json& options = member(body, "stream_options"); !options.is_null()) {
    const absl::StatusOr<bool> usage = bool_field(options, "include_usage", false);
    fields.keep(usage.status());
    request.include_usage = usage.ok() && *usage;
  }
  if (const json& kv = member(body, "kv_transfer_params"); !kv.is_null()) {
    const absl::StatusOr<std::string> prefill = string_field(kv, "prefill", "");
    fields.keep(prefill.status());
    if (prefill.ok()) request.prefill_address = *prefill;
    if (const json& resume = member(kv, "resume_token_ids"); !resume.is_null()) {
      fields.keep(read_tokens(resume, "resume_token_ids", &request.resume_tokens));
    }
  }
  if (!fields.status().ok()) return fields.status();
  if (absl::Status status = sampling.validate(); !status.ok()) return status;
  return request;
}

}  // namespace baton::engine::http
