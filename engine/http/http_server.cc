// The server's routes: parse a request on a thread for that, submit it, answer from its events.
#include "engine/http/http_server.h"

#include <atomic>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/http/completion.h"
#include "engine/http/event_loop.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/http/openai/openai_request.h"
#include "engine/http/prompt_tokens.h"
#include "engine/http/request_check.h"
#include "engine/serve/metrics.h"
#include "engine/serve/prometheus_text.h"

namespace baton::engine::http {
namespace {

using nlohmann::json;
using Exchange = std::shared_ptr<HttpExchange>;

constexpr size_t kParsing = 4096;  // requests that wait to be parsed, at most

void reply_json(const json& value, HttpExchange* exchange) {
  exchange->reply(200, "application/json",
                  value.dump(-1, ' ', false, json::error_handler_t::replace));
}

// A part of a path, of which %2F is a slash.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && absl::ascii_isxdigit(text[i + 1]) &&
        absl::ascii_isxdigit(text[i + 2])) {
      plain += absl::HexStringToBytes(std::string(text.substr(i + 1, 2)));
      i += 2;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

constexpr std::string_view kModelPath = "/v1/models/";

}  // namespace

struct HttpServer::Impl {
  Impl(HttpServerOptions given, serve::EngineThread& engine_thread,
       const Tokenizer& model_tokenizer)
      : options(std::move(given)),
        listener(options.listener),
        host{engine_thread, model_tokenizer, options.model, listener.loop()},
        parser(kParsing),
        chats(kParsing) {}
  ~Impl() {
    parser.stop();
    chats.stop();
    listener.stop();
  }

  void register_routes();
  // Runs `task` with the exchange on the thread for parsing; of a chat, on that for chats.
  HttpHandler parsed_by(absl::Status (Impl::*task)(const Exchange&, bool), bool chat);
  absl::Status complete(const Exchange& exchange, bool chat);
  absl::Status tokenize(const Exchange& exchange, bool);
  absl::Status detokenize(const Exchange& exchange, bool);
  // Answers with `page` and the state of the engine, which no load may delay.
  void reply_health(const Exchange& exchange, json page) const;
  json describe_model() const;
  absl::Status check_model(std::string_view model) const;
  absl::Status no_such_model(std::string_view model) const;
  absl::Status check_tokens(const std::vector<int32_t>& tokens) const;

  const HttpServerOptions options;
  HttpListener listener;
  const CompletionHost host;
  std::atomic<bool> draining{false};
  TaskThread parser;  // of bodies and prompts, which may take long
  TaskThread chats;   // likewise, and may wait for the process that renders templates
};

void HttpServer::Impl::reply_health(const Exchange& exchange, json page) const {
  const serve::Liveness& engine = host.engine.liveness();
  const Time quiet = engine.quiet();
  std::string status = "ok";
  if (engine.stopped()) {
    status = engine.why_stopped();
  } else if (options.stuck_after > Time::zero() && quiet >= options.stuck_after) {
    status = absl::StrCat("the engine has work but made no step for ", seconds_of(quiet), " s");
  }
  if (draining) {
    status = "draining";
    page["draining"] = true;
  }
  const int code = status == "ok" ? 200 : 503;
  page["status"] = std::move(status);
  page["quiet_s"] = seconds_of(quiet);
  page["model"] = host.engine.fingerprint();
  if (!options.kv_agent.empty()) {
    page["kv_agent"] = {{"name", options.kv_agent},
                        {"address", options.kv_agent_address},
                        {"ranks", options.kv_agent_ranks}};
  }
  exchange->reply(code, "application/json", page.dump());
}

json HttpServer::Impl::describe_model() const {
  return {{"id", options.model},   {"object", "model"},
          {"created", 0},          {"owned_by", "baton"},
          {"root", options.model}, {"max_model_len", host.engine.max_context()}};
}

absl::Status HttpServer::Impl::check_model(std::string_view model) const {
  if (model.empty() || model == options.model) return absl::OkStatus();
  return no_such_model(model);
}

absl::Status HttpServer::Impl::no_such_model(std::string_view model) const {
  return absl::NotFoundError(absl::StrCat("the model \"", std::string(model.substr(0, 128)),
                                          "\" does not exist; this server has \"", options.model,
                                          "\""));
}

absl::Status HttpServer::Impl::check_tokens(const std::vector<int32_t>& tokens) const {
  for (const int32_t token : tokens) {
    if (token < host.tokenizer.vocab_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat("token ", token, " is not in the vocabulary: ",
                                                   "ids are below ", host.tokenizer.vocab_size()));
  }
  return absl::OkStatus();
}

absl::Status HttpServer::Impl::complete(const Exchange& exchange, bool chat) {
  if (exchange->gone()) return absl::OkStatus();  // it left before its turn came
  absl::StatusOr<ApiRequest> parsed =
      parse_api_request(exchange->request().body, chat, options.defaults);
  if (!parsed.ok()) return parsed.status();
  if (absl::Status status = check_model(parsed->model); !status.ok()) return status;
  auto request = std::make_shared<ApiRequest>(*std::move(parsed));
  if (!request->has_seed) request->sampling.seed = std::random_device()();
  auto prompts = prompt_tokens(*request, host.tokenizer, options.chat_template);
  if (!prompts.ok()) return prompts.status();
  for (ApiPrompt& prompt : request->prompts) {
    if (!request->echo || prompt.tokens.empty()) continue;
    if (absl::Status status = check_tokens(prompt.tokens); !status.ok()) return status;
    prompt.text = text_with_special(host.tokenizer, prompt.tokens);
  }
  return Completion::start(host, exchange, std::move(request), *std::move(prompts));
}

absl::Status HttpServer::Impl::tokenize(const Exchange& exchange, bool) {
  const absl::StatusOr<json> body = parse_json(exchange->request().body, "the request body");
  if (!body.ok()) return body.status();
  if (absl::Status status = check_tokenize_fields(*body); !status.ok()) return status;
  const auto model = string_field(*body, "model", "");
  if (!model.ok()) return model.status();
  if (absl::Status status = check_model(*model); !status.ok()) return status;
  const auto strings = bool_field(*body, "return_token_strs", false);
  if (!strings.ok()) return strings.status();
  const json& prompt = member(*body, "prompt");
  const bool begun = prompt.is_null() && options.chat_template.has_value();  // by the template
  const auto special = bool_field(*body, "add_special_tokens", !begun);
  if (!special.ok()) return special.status();
  std::string text;
  if (prompt.is_string()) {
    text = prompt.get<std::string>();
  } else if (prompt.is_null() && !member(*body, "messages").is_null()) {
    const absl::StatusOr<ApiRequest> chat =
        read_api_request(json{{"messages", member(*body, "messages")}}, true);
    if (!chat.ok()) return chat.status();
    const absl::StatusOr<std::string> rendered = chat_text(*chat, options.chat_template);
    if (!rendered.ok()) return rendered.status();
    text = *rendered;
  } else {
    return absl::InvalidArgumentError("/tokenize needs a prompt, a string, or messages");
  }
  const std::vector<int32_t> tokens = host.tokenizer.encode(text, {.add_prefix = *special});
  json token_strs = nullptr;
  if (*strings) token_strs = token_names(host.tokenizer, tokens);
  reply_json({{"count", tokens.size()},
              {"max_model_len", host.engine.max_context()},
              {"tokens", tokens},
              {"token_strs", std::move(token_strs)}},
             exchange.get());
  return absl::OkStatus();
}

absl::Status HttpServer::Impl::detokenize(const Exchange& exchange, bool) {
  const absl::StatusOr<json> body = parse_json(exchange->request().body, "the request body");
  if (!body.ok()) return body.status();
  if (absl::Status status = check_detokenize_fields(*body); !status.ok()) return status;
  const auto model = string_field(*body, "model", "");
  if (!model.ok()) return model.status();
  if (absl::Status status = check_model(*model); !status.ok()) return status;
  const json& given = member(*body, "tokens");
  if (!given.is_array()) {
    return absl::InvalidArgumentError("/detokenize needs tokens, an array of token ids");
  }
  std::vector<int32_t> tokens;
  if (absl::Status status = read_tokens(given, "tokens", &tokens); !status.ok()) return status;
  if (absl::Status status = check_tokens(tokens); !status.ok()) return status;
  reply_json({{"prompt", text_with_special(host.tokenizer, tokens)}}, exchange.get());
  return absl::OkStatus();
}

HttpHandler HttpServer::Impl::parsed_by(absl::Status (Impl::*task)(const Exchange&, bool),
                                        bool chat) {
  return [this, task, chat](const Exchange& exchange) {
    const bool taken = (chat ? chats : parser).post([this, task, chat, exchange] {
      if (absl::Status status = (this->*task)(exchange, chat); !status.ok()) {
        reply_error(status, exchange.get());
      }
    });
    if (!taken) {
      reply_error(absl::ResourceExhaustedError("too many requests wait to be read; try later"),
                  exchange.get());
    }
  };
}

void HttpServer::Impl::register_routes() {
  listener.set_filter([this](const Exchange& exchange) {
    mark_request(exchange.get());
    return !check_api_key(options.api_key, exchange.get());
  });
  listener.route("POST", "/v1/completions", parsed_by(&Impl::complete, false));
  listener.route("POST", "/v1/chat/completions", parsed_by(&Impl::complete, true));
  listener.route("POST", "/tokenize", parsed_by(&Impl::tokenize, true));
  listener.route("POST", "/detokenize", parsed_by(&Impl::detokenize, false));
  listener.route("GET", "/v1/models", [this](const Exchange& exchange) {
    reply_json({{"object", "list"}, {"data", {describe_model()}}}, exchange.get());
  });
  listener.route("GET", std::string(kModelPath), [this](const Exchange& exchange) {
    const std::string_view path = exchange->request().path;
    const std::string model = unescaped(path.substr(kModelPath.size()));
    if (model == options.model) return reply_json(describe_model(), exchange.get());
    reply_error(no_such_model(model), exchange.get());
  });
  listener.route("GET", "/health",
                 [this](const Exchange& exchange) { reply_health(exchange, json::object()); });
  listener.route("GET", "/version", [](const Exchange& exchange) {
    reply_json({{"version", BATON_VERSION}}, exchange.get());
  });
  listener.route("GET", "/v1/baton/address", [this](const Exchange& exchange) {
    reply_health(exchange, {{"address", options.kv_address}});
  });
  listener.route("GET", "/metrics", [this](const Exchange& exchange) {
    std::string page = host.metrics->prometheus(host.engine.stats());
    serve::PrometheusPage more("baton_", &page);
    more.single("requests_refused_total", "Refused for want of time (429).", "counter",
                host.engine.refused());
    print_connections(listener.stats(), &page);
    if (options.more_metrics) page += options.more_metrics();
    exchange->reply(200, "text/plain; version=0.0.4", page);
  });
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

void HttpServer::drain() {
  impl_->draining = true;
  impl_->listener.drain(always_answered());
}
bool HttpServer::drained() const {
  return impl_->listener.unanswered() == 0 && impl_->host.engine.idle();
}
void HttpServer::end_requests() { impl_->host.engine.stop(); }

int HttpServer::port() const { return impl_->listener.port(); }
HttpListenerStats HttpServer::connections() const { return impl_->listener.stats(); }

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::start(HttpServerOptions options,
                                                              serve::EngineThread& engine,
                                                              const Tokenizer& tokenizer) {
  if (!engine.status().ok()) return engine.status();
  auto impl = std::make_unique<Impl>(std::move(options), engine, tokenizer);
  impl->register_routes();
  absl::Status status = impl->listener.listen(impl->options.host, impl->options.port);
  if (!status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

}  // namespace baton::engine::http
