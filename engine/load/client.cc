// Requests of OpenAI's API, and the events of a streamed answer.
#include "engine/load/client.h"

#include <algorithm>
#include <future>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"

namespace baton::engine::load {
namespace {

using nlohmann::json;

constexpr int kMost = 1 << 30;

Time since(Time begin) { return Clock::steady().now() - begin; }

size_t count(const json& object, const char* key) {
  return static_cast<size_t>(int_field(object, key, 0, kMost, 0).value_or(0));
}

Time milliseconds(const json& object, const char* key) {
  const double ms = number_field(object, key, 0, 1e12, 0).value_or(0);
  return std::chrono::duration_cast<Time>(std::chrono::duration<double, std::milli>(ms));
}

// The server's words, as far as they are one line.
std::string error_text(std::string_view body) {
  const absl::StatusOr<json> parsed = parse_json(body, "an error");
  const json& error = parsed.ok() ? member(*parsed, "error") : json();
  const std::string said = string_field(error, "message", "").value_or("");
  return said.empty() ? std::string(body.substr(0, std::min<size_t>(body.find('\n'), 200))) : said;
}

http::HttpFetchRequest post(const Server& server, std::string path, const json& body) {
  http::HttpFetchRequest request{.url = server.url,
                                 .method = "POST",
                                 .path = std::move(path),
                                 .body = {std::make_shared<const std::string>(
                                     body.dump(-1, ' ', false, json::error_handler_t::replace))},
                                 .headers = {{"Content-Type", "application/json"}}};
  if (!server.key.empty()) request.headers.emplace_back("Authorization", "Bearer " + server.key);
  return request;
}

// One streamed answer: keeps itself alive by the events of its fetch.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(std::function<void(Answer)> done)
      : begin_(Clock::steady().now()), done_(std::move(done)) {}

  http::HttpFetchEvents events() {
    const auto self = shared_from_this();
    return {.on_head = [self](int status, std::string_view) { self->status_ = status; },
            .on_body = [self](std::string_view bytes) { self->add(bytes); },
            .on_end = [self](const absl::Status& status) { self->end(status); }};
  }

 private:
  void add(std::string_view bytes) {
    buffer_.append(bytes);
    if (status_ != 200) return;
    size_t begin = 0;
    for (size_t end; (end = buffer_.find('\n', begin)) != std::string::npos; begin = end + 1) {
      std::string_view line = std::string_view(buffer_).substr(begin, end - begin);
      if (line.ends_with('\r')) line.remove_suffix(1);
      constexpr std::string_view kData = "data: ";
      if (line.starts_with(kData)) event(line.substr(kData.size()));
    }
    buffer_.erase(0, begin);
  }

  void event(std::string_view data) {
    if (data == "[DONE]") {
      whole_ = true;
      return;
    }
    const absl::StatusOr<json> event = parse_json(data, "an event");
    if (!event.ok()) return;
    if (const json& error = member(*event, "error"); !error.is_null()) {
      answer_.error = error_text(data);
    }
    usage(member(*event, "usage"));
    const json& choices = member(*event, "choices");
    if (!choices.is_array() || choices.empty()) return;
    const Time now = since(begin_);
    if (events_++ == 0) {
      answer_.first = now;
    } else {
      answer_.gaps.push_back(now - answer_.end);
    }
    answer_.end = now;
  }

  void usage(const json& usage) {
    if (!usage.is_object()) return;
    answer_.input = count(usage, "prompt_tokens");
    answer_.output = count(usage, "completion_tokens");
    const json& details = member(usage, "prompt_tokens_details");
    answer_.cached = count(details, "cached_tokens");
    answer_.loaded = count(details, "kv_loaded_tokens");
    answer_.queued = milliseconds(details, "queued_ms");
    answer_.kv_wait = milliseconds(details, "kv_wait_ms");
    answer_.kv_error = string_field(details, "kv_load_error", "").value_or("");
  }

  void end(const absl::Status& status) {
    if (answer_.output == 0) answer_.output = events_;
    if (status_ != 0 && status_ != 200) {
      answer_.error = absl::StrCat("HTTP ", status_, ": ", error_text(buffer_));
    } else if (!status.ok()) {
      answer_.error = std::string(status.message());
    } else if (answer_.error.empty() && !whole_) {
      answer_.error = "the answer ended before data: [DONE]";
    } else if (answer_.error.empty() && events_ == 0) {
      answer_.error = "the answer has no token";
    }
    done_(std::move(answer_));
  }

  const Time begin_;
  const std::function<void(Answer)> done_;
  Answer answer_;
  int status_ = 0;
  size_t events_ = 0;
  bool whole_ = false;
  std::string buffer_;
};

// One answer that is not streamed, as JSON.
absl::StatusOr<json> fetch(const std::shared_ptr<http::EventLoop>& loop,
                           http::HttpFetchRequest request) {
  struct Whole {
    int status = 0;
    std::string body;
    std::promise<absl::Status> ended;
    std::unique_ptr<http::HttpFetch> fetch;
  };
  const auto whole = std::make_shared<Whole>();
  request.timeout = patient(std::chrono::milliseconds(60'000));
  const std::string what = absl::StrCat(request.method, " ", request.url.text(), request.path);
  loop->post([&] {
    whole->fetch = http::HttpFetch::start(
        loop, std::move(request),
        {.on_head = [whole](int status, std::string_view) { whole->status = status; },
         .on_body = [whole](std::string_view bytes) { whole->body += bytes; },
         .on_end = [whole](const absl::Status& status) { whole->ended.set_value(status); }});
  });
  const absl::Status status = whole->ended.get_future().get();
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(what, ": ", std::string(status.message())));
  }
  if (whole->status != 200) {
    return absl::UnavailableError(
        absl::StrCat(what, ": HTTP ", whole->status, ": ", error_text(whole->body)));
  }
  return parse_json(whole->body, what);
}

absl::Status with_advice(const absl::Status& status, std::string_view advice) {
  return absl::UnavailableError(
      absl::StrCat(std::string(status.message()), "; ", std::string(advice)));
}

}  // namespace

absl::StatusOr<std::string> model_of(const std::shared_ptr<http::EventLoop>& loop,
                                     const Server& server) {
  http::HttpFetchRequest request = post(server, "/v1/models", json());
  request.method = "GET";
  request.body.clear();
  const absl::StatusOr<json> models = fetch(loop, std::move(request));
  if (!models.ok())
    return with_advice(models.status(), "is a server running there? Otherwise give --model");
  const json& data = member(*models, "data");
  const std::string id =
      data.is_array() && !data.empty() ? string_field(data[0], "id", "").value_or("") : "";
  if (id.empty()) return absl::UnavailableError("the server names no model: give --model");
  return id;
}

absl::StatusOr<Words> words_of(const std::shared_ptr<http::EventLoop>& loop, const Server& server,
                               std::string_view text) {
  json body{{"prompt", text}, {"add_special_tokens", false}};
  if (!server.model.empty()) body["model"] = server.model;
  const absl::StatusOr<json> said = fetch(loop, post(server, "/tokenize", body));
  if (!said.ok()) {
    return with_advice(said.status(),
                       "requests of given lengths need it: --dataset-name text does not");
  }
  Words words;
  const json& tokens = member(*said, "tokens");
  for (const json& token : tokens) {
    if (token.is_number_integer()) words.tokens.push_back(token.get<int32_t>());
  }
  if (words.tokens.empty()) return absl::UnavailableError("/tokenize gave no tokens");
  std::sort(words.tokens.begin(), words.tokens.end());
  words.tokens.erase(std::unique(words.tokens.begin(), words.tokens.end()), words.tokens.end());
  return words;
}

std::unique_ptr<http::HttpFetch> ask(const std::shared_ptr<http::EventLoop>& loop,
                                     const Server& server, const LoadRequest& request,
                                     uint64_t seed, std::chrono::milliseconds timeout,
                                     std::function<void(Answer)> done) {
  json body{{"model", server.model},
            {"max_tokens", request.output},
            {"temperature", server.temperature},
            {"ignore_eos", true},
            {"stream", true},
            {"stream_options", {{"include_usage", true}}}};
  if (server.temperature > 0) body["seed"] = seed;
  if (request.tokens.empty()) {
    body["prompt"] = request.text;
  } else {
    body["prompt"] = request.tokens;
  }
  http::HttpFetchRequest http = post(server, "/v1/completions", body);
  http.timeout = timeout;
  const auto stream = std::make_shared<Stream>(std::move(done));
  return http::HttpFetch::start(loop, std::move(http), stream->events());
}

}  // namespace baton::engine::load
