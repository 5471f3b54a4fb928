// Parses requests; nothing in them is trusted.
#include "engine/http/openai/openai_request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/shard/kv_address.h"
#include "transport/base/nearest_name.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;

// A string, an array of token ids, or an array of either.
absl::Status read_prompts(const json& body, ApiRequest* request) {
  const json& prompt = member(body, "prompt");
  const auto wrong = [] {
    return absl::InvalidArgumentError(
        "prompt must be a string, an array of token ids, or an array of these");
  };
  const auto read_one = [&](const json& one) {
    ApiPrompt read;
    if (one.is_string()) {
      read.text = one.get<std::string>();
    } else if (one.is_array() && !one.empty()) {
      if (absl::Status status = read_tokens(one, "prompt", &read.tokens); !status.ok()) {
        return status;
      }
    } else {
      return wrong();
    }
    request->prompts.push_back(std::move(read));
    return absl::OkStatus();
  };
  if (!prompt.is_array()) return read_one(prompt);
  if (prompt.empty()) return wrong();
  if (prompt[0].is_number()) return read_one(prompt);
  if (prompt.size() > kMaxChoices) {
    return absl::InvalidArgumentError(
        absl::StrCat(prompt.size(), " prompts were given; at most ", kMaxChoices, " may be"));
  }
  for (const json& one : prompt) {
    if (absl::Status status = read_one(one); !status.ok()) return status;
  }
  return absl::OkStatus();
}

// A string, or a list of parts of which each is a text.
absl::StatusOr<std::string> read_content(const json& message) {
  const json& content = member(message, "content");
  if (content.is_null()) return std::string();
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) {
    return absl::InvalidArgumentError("a message's content must be a string or a list of parts");
  }
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const json& part = content[i];
    if (i > 0) text += '\n';
    if (part.is_string()) {
      text += part.get_ref<const std::string&>();
      continue;
    }
    const absl::StatusOr<std::string> type = string_field(part, "type", "");
    if (!type.ok() || *type != "text") {
      return absl::InvalidArgumentError(
          "a part of a message's content must have \"type\": \"text\"; this model reads nothing "
          "else");
    }
    if (!member(part, "text").is_string()) {
      return absl::InvalidArgumentError("a part of type \"text\" needs a \"text\", a string");
    }
    absl::Status status = check_part_fields(part);
    if (!status.ok()) return status;
    text += member(part, "text").get_ref<const std::string&>();
  }
  return text;
}

absl::Status read_messages(const json& body, ApiRequest* request) {
  const json& messages = member(body, "messages");
  if (!messages.is_array() || messages.empty()) {
    return absl::InvalidArgumentError("messages must be an array with at least one message");
  }
  for (const json& message : messages) {
    const absl::StatusOr<std::string> role = string_field(message, "role", "");
    if (!role.ok() || role->empty()) {
      return absl::InvalidArgumentError("every message needs a role, a string");
    }
    if (absl::Status status = check_message_fields(message); !status.ok()) return status;
    absl::StatusOr<std::string> name = string_field(message, "name", "");
    if (!name.ok()) return absl::InvalidArgumentError("the name of a message must be a string");
    absl::StatusOr<std::string> content = read_content(message);
    if (!content.ok()) return content.status();
    request->messages.push_back({*role, *std::move(content), *std::move(name)});
  }
  request->prompts.push_back({render_chat(request->messages), {}});
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

// {"TOKEN": bias, ...}
absl::Status read_logit_bias(const json& body, serve::SamplingParams* sampling) {
  const json& given = member(body, "logit_bias");
  if (given.is_null()) return absl::OkStatus();
  const auto wrong = [] {
    return absl::InvalidArgumentError(
        "logit_bias must be an object with token ids as names and numbers as values");
  };
  if (!given.is_object()) return wrong();
  for (const auto& item : given.items()) {
    int32_t token = 0;
    if (!absl::SimpleAtoi(item.key(), &token) || token < 0 || !item.value().is_number()) {
      return wrong();
    }
    sampling->logit_bias.emplace_back(token, item.value().get<double>());
  }
  return absl::OkStatus();
}

// A name or an address in kv_transfer_params; "" where there is none.
absl::StatusOr<std::string> hand_off_text(const json& given, const char* key) {
  constexpr size_t kLongest = 256;
  absl::StatusOr<std::string> text = string_field(given, key, "");
  if (text.ok() && text->size() <= kLongest) return text;
  return absl::InvalidArgumentError(absl::StrCat("\"", key, "\" of kv_transfer_params must be ",
                                                 "a string of at most ", kLongest, " bytes"));
}

constexpr int64_t kMostRanks = 512;

// As a vLLM server with the connector baton.vllm reads them.
absl::Status read_hand_off(const json& given, ApiRequest* request) {
  const absl::StatusOr<bool> decode = bool_field(given, "do_remote_decode", false);
  const absl::StatusOr<bool> prefill = bool_field(given, "do_remote_prefill", false);
  const absl::StatusOr<bool> finished = bool_field(given, "remote_finished", false);
  const auto transfer = hand_off_text(given, "transfer_id");
  const auto agent = hand_off_text(given, "remote_agent");
  const auto address = hand_off_text(given, "remote_address");
  const absl::StatusOr<int64_t> ranks = int_field(given, "tp_size", 1, kMostRanks, 1);
  for (const absl::Status& status :
       {decode.status(), prefill.status(), finished.status(), transfer.status(), agent.status(),
        address.status(), ranks.status()}) {
    if (!status.ok()) return status;
  }
  if (*decode) request->hand_over = *transfer;
  if (!*prefill) return absl::OkStatus();
  const size_t colon = address->rfind(':');
  int port = 0;
  if (transfer->empty() || agent->empty() || colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address->substr(colon + 1), &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(
        "\"do_remote_prefill\" of kv_transfer_params needs \"transfer_id\", \"remote_agent\" and "
        "\"remote_address\" (HOST:PORT) beside it: pass on what prefill answered");
  }
  request->remote_prefill = {*transfer, *agent, *address, *finished, static_cast<uint32_t>(*ranks)};
  return absl::OkStatus();
}

// Whatever the server's role is: one that fetches no KV does not pass over what cannot be meant.
absl::Status read_kv_transfer(const json& body, ApiRequest* request) {
  const json& given = member(body, "kv_transfer_params");
  if (given.is_null()) return absl::OkStatus();
  if (!given.is_object()) {
    return absl::InvalidArgumentError("\"kv_transfer_params\" must be an object");
  }
  // The last four are what proxies for vLLM's NixlConnector say besides.
  static const std::vector<std::string> known = {
      "prefill",          "resume_token_ids", "do_remote_decode", "do_remote_prefill",
      "transfer_id",      "remote_agent",     "remote_address",   "remote_finished",
      "remote_engine_id", "remote_block_ids", "remote_host",      "remote_port"};
  // What prefill answered is passed on as it is, and vLLM adds words of its own to it.
  const bool passed_on = member(given, "do_remote_prefill") == true;
  for (const auto& [name, value] : given.items()) {
    if (passed_on || value.is_null()) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string shown = name.substr(0, 64);
    return absl::InvalidArgumentError(absl::StrCat("kv_transfer_params has no \"", shown, "\"",
                                                   base::did_you_mean(shown, known)));
  }
  if (const json& prefill = member(given, "prefill"); !prefill.is_null()) {
    constexpr const char* kWhat = "\"prefill\" of kv_transfer_params";
    if (!prefill.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(kWhat, " must be a string"));
    }
    request->prefill_address = prefill.get<std::string>();
    const absl::Status status = shard::check_kv_address(request->prefill_address);
    if (!request->prefill_address.empty() && !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(kWhat, ": ", status.message()));
    }
  }
  if (const json& resume = member(given, "resume_token_ids"); !resume.is_null()) {
    constexpr const char* kWhat = "\"resume_token_ids\" of kv_transfer_params";
    if (!resume.is_array()) {
      return absl::InvalidArgumentError(absl::StrCat(kWhat, " must be an array of token ids"));
    }
    const absl::Status status = read_tokens(resume, kWhat, &request->resume_tokens);
    if (!status.ok()) return status;
  }
  return read_hand_off(given, request);
}

// Any 64 bits are a seed: those that a client calls 2^63 and more are what it calls negative, too.
absl::StatusOr<uint64_t> read_seed(const json& body) {
  const json& seed = member(body, "seed");
  if (seed.is_number_unsigned()) return seed.get<uint64_t>();
  constexpr double k63 = 9223372036854775808.0;  // 2^63
  if (seed.is_number_float() && seed.get<double>() >= k63 && seed.get<double>() < 2 * k63) {
    return static_cast<uint64_t>(seed.get<double>());
  }
  const auto number = int_field(body, "seed", INT64_MIN, INT64_MAX, 0);
  if (!number.ok()) return number.status();
  return static_cast<uint64_t>(*number);
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
  void text(const char* key, std::string* out) { take(string_field(body_, key, *out), out); }
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

absl::Status read_tokens(const json& value, const char* what, std::vector<int32_t>* out) {
  for (const json& token : value) {
    const std::optional<int64_t> id = whole_number(token);
    if (!id.has_value() || *id < 0 || *id > INT32_MAX) {
      return absl::InvalidArgumentError(absl::StrCat(what, " must be an array of token ids"));
    }
    out->push_back(static_cast<int32_t>(*id));
  }
  return absl::OkStatus();
}

std::string render_chat(const std::vector<ApiMessage>& messages) {
  std::string prompt;
  for (const ApiMessage& message : messages) {
    absl::StrAppend(&prompt, message.role, message.name.empty() ? "" : " ", message.name, ": ",
                    message.content, "\n");
  }
  return prompt + "assistant:";
}

uint64_t seed_of_choice(uint64_t seed, int j) { return seed + static_cast<uint64_t>(j); }

absl::StatusOr<ApiRequest> parse_api_request(std::string_view body, bool chat,
                                             const serve::SamplingDefaults& defaults) {
  const absl::StatusOr<json> parsed = parse_json(body, "the request body");
  if (!parsed.ok()) return parsed.status();
  return read_api_request(*parsed, chat, defaults);
}

absl::StatusOr<ApiRequest> read_api_request(const json& body, bool chat,
                                            const serve::SamplingDefaults& defaults) {
  if (!body.is_object()) return absl::InvalidArgumentError("the request body must be an object");
  if (absl::Status status = check_api_fields(body, chat); !status.ok()) return status;
  ApiRequest request;
  request.chat = chat;
  serve::SamplingParams& sampling = request.sampling;
  defaults.apply(&sampling);
  Fields fields(body);
  fields.keep(chat ? read_messages(body, &request) : read_prompts(body, &request));
  fields.keep(read_stop(body, &sampling));
  fields.text("model", &request.model);
  if (chat && !defaults.max_tokens.has_value()) sampling.max_tokens = INT32_MAX;
  if (!chat) fields.boolean("echo", &request.echo);
  fields.integer("max_tokens", request.echo ? 0 : 1, INT32_MAX, &sampling.max_tokens);
  if (chat && fields.has("max_completion_tokens")) {
    const int by_the_old_name = sampling.max_tokens;
    fields.integer("max_completion_tokens", 1, INT32_MAX, &sampling.max_tokens);
    if (fields.has("max_tokens") && sampling.max_tokens != by_the_old_name) {
      fields.keep(absl::InvalidArgumentError(
          "\"max_tokens\" and \"max_completion_tokens\" are two names of one limit, and differ: "
          "leave \"max_tokens\" out"));
    }
  }
  fields.number("temperature", 0, 100, &sampling.temperature);
  fields.number("top_p", 0, 1, &sampling.top_p);
  int64_t top_k = sampling.top_k;
  fields.integer("top_k", -1, INT32_MAX, &top_k);  // vLLM's clients write -1 for "all"
  sampling.top_k = top_k < 0 ? 0 : static_cast<int>(top_k);
  request.has_seed = fields.has("seed");
  const absl::StatusOr<uint64_t> seed = read_seed(body);
  fields.keep(seed.status());
  sampling.seed = seed.value_or(0);
  fields.boolean("ignore_eos", &sampling.ignore_eos);
  fields.boolean("stream", &request.stream);
  fields.boolean("return_token_ids", &request.return_token_ids);
  if (chat) {
    fields.boolean("logprobs", &request.logprobs);
    sampling.logprobs = request.logprobs ? 0 : -1;
    int top = 0;
    fields.integer("top_logprobs", 0, 20, &top);
    if (request.logprobs) {
      sampling.logprobs = top;
    } else if (top > 0) {
      fields.keep(absl::InvalidArgumentError("\"top_logprobs\" needs \"logprobs\": true"));
    }
  } else {
    fields.integer("logprobs", 0, 20, &sampling.logprobs);
    request.logprobs = sampling.logprobs >= 0;
    sampling.prompt_logprobs = request.echo && request.logprobs;
  }
  fields.integer("n", 1, static_cast<int64_t>(kMaxChoices), &request.n);
  int best_of = request.n;
  if (!chat) fields.integer("best_of", 1, static_cast<int64_t>(kMaxChoices), &best_of);
  if (best_of != request.n) {
    fields.keep(absl::InvalidArgumentError(
        "\"best_of\" other than \"n\" is not supported: ask for more choices with \"n\" and "
        "\"logprobs\", and take the likeliest"));
  }
  if (request.choices() > kMaxChoices) {
    fields.keep(absl::InvalidArgumentError(
        absl::StrCat(request.prompts.size(), " prompts with n = ", request.n,
                     " are too many choices; at most ", kMaxChoices, " may be")));
  }
  fields.number("min_p", 0, 1, &sampling.min_p);
  fields.number("presence_penalty", -2, 2, &sampling.presence_penalty);
  fields.number("frequency_penalty", -2, 2, &sampling.frequency_penalty);
  fields.number("repetition_penalty", 0, 100, &sampling.repetition_penalty);
  fields.integer("min_tokens", 0, INT32_MAX, &sampling.min_tokens);
  fields.keep(read_logit_bias(body, &sampling));
  if (const json& stops = member(body, "stop_token_ids"); stops.is_array()) {
    fields.keep(read_tokens(stops, "stop_token_ids", &sampling.stop_token_ids));
  } else if (!stops.is_null()) {
    fields.keep(absl::InvalidArgumentError("stop_token_ids must be an array of token ids"));
  }
  if (const json& options = member(body, "stream_options"); !options.is_null()) {
    const absl::StatusOr<bool> usage = bool_field(options, "include_usage", false);
    const absl::StatusOr<bool> continuous = bool_field(options, "continuous_usage_stats", false);
    fields.keep(usage.status());
    fields.keep(continuous.status());
    request.include_usage = usage.ok() && *usage;
    request.continuous_usage = continuous.ok() && *continuous;
    for (const auto& [name, value] : options.items()) {
      if (name == "include_usage" || name == "continuous_usage_stats") continue;
      if (name == "include_obfuscation" && !value.is_null() && value != true) continue;
      fields.keep(absl::InvalidArgumentError(
          absl::StrCat("\"", name.substr(0, 64), "\" of stream_options is not supported here")));
    }
  }
  fields.keep(read_kv_transfer(body, &request));
  if (!fields.status().ok()) return fields.status();
  if (request.choices() > 1 && !request.resume_tokens.empty()) {
    return absl::InvalidArgumentError("resume_token_ids is for requests with one choice");
  }
  if (request.choices() > 1 &&
      (request.hand_over.has_value() || request.remote_prefill.has_value())) {
    return absl::InvalidArgumentError("KV is handed over for requests with one choice");
  }
  if (absl::Status status = sampling.validate(); !status.ok()) return status;
  return request;
}

}  // namespace baton::engine::http
