// The engine's HTTP handlers: parse a request, submit it, stream the reply.
#include "engine/http/http_server.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/http/event_stream.h"
#include "engine/http/http_listener.h"
#include "engine/http/openai_reply.h"
#include "engine/serve/metrics.h"

namespace baton::engine::http {
namespace {

constexpr std::chrono::milliseconds kPoll{100};  // how often a silent client is looked at

// One client's request: aborted if it is dropped before its last event.
class Call {
 public:
  Call(serve::EngineThread& engine, const ApiRequest& api, std::vector<int32_t> tokens,
       std::shared_ptr<serve::ServingMetrics> metrics)
      : engine_(engine), stream_(std::make_shared<EventStream>()) {
    serve::Request request;
    request.tokens = std::move(tokens);
    request.resume_tokens = api.resume_tokens;
    request.sampling = api.sampling;
    request.prefill_address = api.prefill_address;
    request.on_event = [stream = stream_,
                        metrics = std::move(metrics)](const serve::OutputEvent& event) {
      if (event.finished) metrics->observe(*event.metrics, event.reason);
      stream->push(event);
    };
    id_ = engine_.submit(std::move(request));
  }
  ~Call() {
    if (!finished_) engine_.abort(id_);
  }

  uint64_t id() const { return id_; }
  std::optional<StreamedEvent> next(std::chrono::milliseconds timeout) {
    std::optional<StreamedEvent> event = stream_->pop(timeout);
    if (event.has_value() && event->event.finished) finished_ = true;
    return event;
  }

 private:
  serve::EngineThread& engine_;
  const std::shared_ptr<EventStream> stream_;
  uint64_t id_ = 0;
  bool finished_ = false;
};

bool write(httplib::DataSink& sink, const std::string& text) {
  return sink.write(text.data(), text.size());
}

}  // namespace

struct HttpServer::Impl {
  Impl(HttpServerOptions given, serve::EngineThread& engine_thread,
       const Tokenizer& model_tokenizer)
      : options(std::move(given)),
        engine(engine_thread),
        tokenizer(model_tokenizer),
        listener(options.connections) {}

  void complete(const httplib::Request& http, httplib::Response& response, bool chat);
  void register_handlers();

  const HttpServerOptions options;
  serve::EngineThread& engine;
  const Tokenizer& tokenizer;
  // Shared with requests, whose last event may come after the server is gone.
  const std::shared_ptr<serve::ServingMetrics> metrics = std::make_shared<serve::ServingMetrics>();
  HttpListener listener;
};

void HttpServer::Impl::complete(const httplib::Request& http, httplib::Response& response,
                                bool chat) {
  absl::StatusOr<ApiRequest> api = parse_api_request(http.body, chat);
  if (!api.ok()) return reply_error(api.status(), &response);
  if (!api->has_seed) api->sampling.seed = std::random_device()();
  std::vector<int32_t> tokens = api->prompt_tokens;
  if (tokens.empty()) tokens = tokenizer.encode(api->prompt);
  auto call = std::make_shared<Call>(engine, *api, std::move(tokens), metrics);
  auto reply = std::make_shared<ApiReply>(*api, options.model, call->id(), tokenizer);

  // The first event decides about the HTTP status; after it the reply goes out piece by piece.
  std::optional<StreamedEvent> first;
  while (!first.has_value()) {
    if (listener.stopping()) return reply_error(absl::UnavailableError("shutting down"), &response);
    first = call->next(kPoll);
  }
  if (first->event.finished && !first->event.status.ok()) {
    return reply_error(first->event.status, &response);
  }
  auto pending = std::make_shared<std::optional<StreamedEvent>>(std::move(first));
  const bool stream = api->stream;
  response.set_chunked_content_provider(
      stream ? "text/event-stream" : "application/json",
      [this, call, reply, pending, stream](size_t, httplib::DataSink& sink) {
        std::optional<StreamedEvent> event = std::exchange(*pending, std::nullopt);
        if (!event.has_value()) event = call->next(kPoll);
        if (!sink.is_writable() || listener.stopping()) return false;
        if (!event.has_value()) return true;
        const bool finished = event->event.finished;
        if (stream) {
          if (!write(sink, reply->stream_event(event->view()))) return false;
        } else {
          reply->add(event->view());
          if (!finished) return true;
          const absl::Status& status = event->event.status;
          if (!write(sink, status.ok() ? reply->whole() : api_error(status))) return false;
        }
        if (finished) sink.done();
        return true;
      });
}

void HttpServer::Impl::register_handlers() {
  using HttpRequest = httplib::Request;
  using HttpResponse = httplib::Response;
  httplib::Server& server = listener.server();
  server.Post("/v1/completions", [this](const HttpRequest& request, HttpResponse& response) {
    complete(request, response, false);
  });
  server.Post("/v1/chat/completions", [this](const HttpRequest& request, HttpResponse& response) {
    complete(request, response, true);
  });
  server.Get("/v1/models", [this](const HttpRequest&, HttpResponse& response) {
    const nlohmann::json model = {{"id", options.model},
                                  {"object", "model"},
                                  {"owned_by", "baton"},
                                  {"max_model_len", engine.max_context()}};
    response.set_content(nlohmann::json{{"object", "list"}, {"data", {model}}}.dump(),
                         "application/json");
  });
  server.Get("/health", [](const HttpRequest&, HttpResponse& response) {
    response.set_content("{\"status\":\"ok\"}", "application/json");
  });
  server.Get("/v1/baton/address", [this](const HttpRequest&, HttpResponse& response) {
    response.set_content(nlohmann::json{{"address", options.kv_address}}.dump(),
                         "application/json");
  });
  server.Get("/metrics", [this](const HttpRequest&, HttpResponse& response) {
    response.set_content(metrics->prometheus(engine.stats(), engine.connector_stats()),
                         "text/plain; version=0.0.4");
  });
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const { return impl_->listener.port(); }

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::start(HttpServerOptions options,
                                                              serve::EngineThread& engine,
                                                              const Tokenizer& tokenizer) {
  auto impl = std::make_unique<Impl>(std::move(options), engine, tokenizer);
  impl->register_handlers();
  absl::Status status = impl->listener.listen(impl->options.host, impl->options.port);
  if (!status.ok()) return status;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

}  // namespace baton::engine::http
