// The router's routes; relayed_request.h has a request's way through the workers.
#include "engine/router/router.h"

#include <future>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/http/api_door.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/http/task_thread.h"
#include "engine/router/health_watch.h"
#include "engine/router/relayed_request.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;
using Exchange = std::shared_ptr<http::HttpExchange>;

constexpr size_t kParsing = 4096;  // requests that wait to be parsed, at most

absl::StatusOr<std::vector<http::HttpUrl>> parse_urls(const std::vector<std::string>& texts) {
  std::vector<http::HttpUrl> urls;
  for (const std::string& text : texts) {
    absl::StatusOr<http::HttpUrl> url = http::HttpUrl::parse(text);
    if (!url.ok()) return url.status();
    urls.push_back(*std::move(url));
  }
  return urls;
}

}  // namespace

struct Router::Impl {
  Impl(RouterOptions given, std::vector<http::HttpUrl> prefill, std::vector<http::HttpUrl> decode)
      : options(std::move(given)),
        listener(options.listener),
        workers(std::move(prefill), std::move(decode)),
        health({options.health_interval, options.health_timeout, options.health_misses}, workers,
               [this](size_t worker) { leave(worker); }),
        parser(kParsing) {
    workers.max_retries = options.max_retries;
    workers.api_key = options.api_key;
    workers.loop = listener.loop();
  }
  ~Impl() {
    parser.stop();
    listener.stop();
  }

  void register_routes();
  void complete(const Exchange& exchange, bool chat);
  void leave(size_t worker);
  void proxy(const Exchange& exchange, size_t first);
  json health_page(bool* usable);
  std::string metrics_page();

  const RouterOptions options;
  http::HttpListener listener;
  Workers workers;
  HealthWatch health;
  http::TaskThread parser;
};

void Router::Impl::complete(const Exchange& exchange, bool chat) {
  absl::StatusOr<json> body = parse_json(exchange->request().body, "the request body");
  if (!body.ok()) return http::reply_error(body.status(), exchange.get());
  absl::StatusOr<http::ApiRequest> parsed = http::read_api_request(*body, chat);
  if (!parsed.ok()) return http::reply_error(parsed.status(), exchange.get());
  auto request = std::make_shared<http::ApiRequest>(*std::move(parsed));
  if (!request->has_seed) request->sampling.seed = std::random_device()();
  listener.loop()->post([this, exchange, body = *std::move(body), request]() mutable {
    RelayedRequest::start(workers, exchange, body, std::move(request), exchange->request_id());
  });
}

void Router::Impl::leave(size_t worker) {
  std::vector<std::shared_ptr<RelayedRequest>> affected;
  for (RelayedRequest* request : workers.open) affected.push_back(request->shared_from_this());
  for (const auto& request : affected) request->leave_worker(worker);
}

// What any worker can answer is asked of one after the other.
void Router::Impl::proxy(const Exchange& exchange, size_t worker) {
  if (worker == workers.decode.size()) {
    return http::reply_error(absl::UnavailableError("no decode worker answers"), exchange.get());
  }
  struct Answer {
    int status = 0;
    std::string body;
    std::unique_ptr<http::HttpFetch> fetch;
  };
  const auto answer = std::make_shared<Answer>();
  http::HttpFetchRequest ask{.url = workers.decode[worker],
                             .method = exchange->request().method,
                             .path = exchange->request().path,
                             .body = exchange->request().body,
                             .headers = {{"Content-Type", "application/json"}},
                             .connect_timeout = options.health_timeout,
                             .timeout = options.health_timeout * 5};
  if (!options.api_key.empty()) {
    ask.headers.emplace_back("Authorization", absl::StrCat("Bearer ", options.api_key));
  }
  answer->fetch = http::HttpFetch::start(
      listener.loop(), std::move(ask),
      {.on_head = [answer](int status, std::string_view) { answer->status = status; },
       .on_body = [answer](std::string_view bytes) { answer->body += bytes; },
       .on_end =
           [this, answer, exchange, worker](const absl::Status& status) {
             // It holds what is running now.
             const std::unique_ptr<http::HttpFetch> ended = std::move(answer->fetch);
             if (!status.ok()) return proxy(exchange, worker + 1);
             exchange->reply(answer->status, "application/json", answer->body);
           }});
}

json Router::Impl::health_page(bool* usable) {
  json list = json::array();
  *usable = false;
  for (size_t i = 0; i < options.decode.size(); ++i) {
    const bool up = workers.decodes.is_up(i);
    *usable |= up;
    list.push_back({{"url", options.decode[i]}, {"role", "decode"}, {"up", up}});
  }
  for (size_t i = 0; i < options.prefill.size(); ++i) {
    list.push_back(
        {{"url", options.prefill[i]}, {"role", "prefill"}, {"up", workers.prefills.is_up(i)}});
  }
  return {{"status", *usable ? "ok" : "no decode worker is up"}, {"workers", std::move(list)}};
}

std::string Router::Impl::metrics_page() {
  std::string page = "# TYPE baton_router_in_flight gauge\n# TYPE baton_router_worker_up gauge\n";
  const auto print = [&](const WorkerPicker& picker, const std::vector<std::string>& urls) {
    for (size_t i = 0; i < urls.size(); ++i) {
      absl::StrAppend(&page, "baton_router_in_flight{worker=\"", urls[i], "\"} ",
                      picker.in_flight(i), "\nbaton_router_worker_up{worker=\"", urls[i], "\"} ",
                      picker.is_up(i) ? 1 : 0, "\n");
    }
  };
  print(workers.decodes, options.decode);
  print(workers.prefills, options.prefill);
  const http::HttpListenerStats stats = listener.stats();
  absl::StrAppend(&page, "# TYPE baton_router_retries_total counter\nbaton_router_retries_total ",
                  workers.retried, "\n# TYPE baton_http_connections gauge\nbaton_http_connections ",
                  stats.connections, "\n# TYPE baton_http_answering gauge\nbaton_http_answering ",
                  stats.answering, "\n");
  return page;
}

void Router::Impl::register_routes() {
  listener.set_filter([this](const Exchange& exchange) {
    http::mark_request(exchange.get());
    return !http::check_api_key(options.api_key, exchange.get());
  });
  for (const bool chat : {false, true}) {
    listener.route("POST", chat ? "/v1/chat/completions" : "/v1/completions",
                   [this, chat](const Exchange& exchange) {
                     if (parser.post([this, exchange, chat] { complete(exchange, chat); })) return;
                     http::reply_error(
                         absl::ResourceExhaustedError("too many requests wait to be read"),
                         exchange.get());
                   });
  }
  const http::HttpHandler ask_a_worker = [this](const Exchange& exchange) { proxy(exchange, 0); };
  listener.route("GET", "/v1/models", ask_a_worker);
  listener.route("POST", "/tokenize", ask_a_worker);
  listener.route("POST", "/detokenize", ask_a_worker);
  listener.route("GET", "/version", ask_a_worker);
  listener.route("GET", "/health", [this](const Exchange& exchange) {
    bool usable = false;
    const std::string page = health_page(&usable).dump();
    exchange->reply(usable ? 200 : 503, "application/json", page);
  });
  listener.route("GET", "/metrics", [this](const Exchange& exchange) {
    exchange->reply(200, "text/plain; version=0.0.4", metrics_page());
  });
}

Router::Router(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Router::~Router() = default;
int Router::port() const { return impl_->listener.port(); }

absl::StatusOr<std::unique_ptr<Router>> Router::start(RouterOptions options) {
  if (options.decode.empty()) {
    return absl::InvalidArgumentError("a router needs at least one --decode URL");
  }
  auto prefill = parse_urls(options.prefill);
  if (!prefill.ok()) return prefill.status();
  auto decode = parse_urls(options.decode);
  if (!decode.ok()) return decode.status();
  auto impl = std::make_unique<Impl>(std::move(options), *std::move(prefill), *std::move(decode));
  impl->register_routes();
  absl::Status status = impl->listener.listen(impl->options.host, impl->options.port);
  if (!status.ok()) return status;
  // The first requests should find the workers known.
  std::promise<void> known;
  impl->listener.loop()->post([router = impl.get(), &known] {
    router->health.probe_all([router, &known] {
      known.set_value();
      router->health.run();
    });
  });
  known.get_future().wait();
  return std::unique_ptr<Router>(new Router(std::move(impl)));
}

}  // namespace baton::engine::router
