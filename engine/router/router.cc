// The router's routes; relayed_request.h has a request's way through the workers.
#include "engine/router/router.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/files.h"
#include "engine/files/json_fields.h"
#include "engine/http/event_loop.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/http/request_check.h"
#include "engine/router/health_watch.h"
#include "engine/router/relayed_request.h"
#include "engine/router/workers.h"
#include "engine/serve/prometheus_text.h"
#include "transport/base/log.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;
using Exchange = std::shared_ptr<http::HttpExchange>;

constexpr size_t kParsing = 4096;  // requests that wait to be parsed, at most
constexpr size_t kMaxListBytes = size_t{1} << 20;

absl::StatusOr<std::vector<http::HttpUrl>> parse_urls(const std::vector<std::string>& texts) {
  std::vector<http::HttpUrl> urls;
  for (const std::string& text : texts) {
    absl::StatusOr<http::HttpUrl> url = http::HttpUrl::parse(text);
    if (!url.ok()) return url.status();
    urls.push_back(*std::move(url));
  }
  return urls;
}

std::string worker_metrics(const Workers& workers) {
  std::string page;
  serve::PrometheusPage out("baton_router_", &page);
  const auto print = [&](const char* name, const char* help, auto value) {
    out.header(name, help, "gauge");
    for (const WorkerGroup* group : {&workers.decode, &workers.prefill}) {
      for (const KnownWorker& worker : *group) {
        if (!worker.is_listed()) continue;
        out.line(name, serve::PrometheusPage::label("worker", worker.name()), value(worker));
      }
    }
  };
  print("in_flight", "Requests that the worker is busy with for this router.",
        [](const KnownWorker& worker) { return worker.in_flight; });
  print("worker_up", "1: the worker is used.",
        [](const KnownWorker& worker) { return worker.up ? 1 : 0; });
  return page;
}

}  // namespace

struct Router::Impl {
  Impl(RouterOptions given, std::vector<http::HttpUrl> prefill, std::vector<http::HttpUrl> decode)
      : options(std::move(given)),
        listener(options.listener),
        workers(std::move(prefill), std::move(decode)),
        health({options.health_interval, options.health_timeout, options.health_misses}, workers,
               [this](WorkerGroup& group, size_t worker) { went_down(group, worker); }),
        parser(kParsing) {
    workers.max_retries = options.max_retries;
    workers.comeback = options.comeback;
    workers.api_key = options.api_key;
    workers.loop = listener.loop();
  }
  ~Impl() {
    parser.stop();
    listener.stop();
  }

  void register_routes();
  void complete(const Exchange& exchange, bool chat);
  // Counts the request's body for as long as a caller has what is returned; null, and the request
  // is refused, where there are too many bytes already.
  Exchange admit(const Exchange& exchange);
  void went_down(WorkerGroup& group, size_t worker);
  // The requests that are not answered yet; they may end while a caller iterates.
  std::vector<std::shared_ptr<RelayedRequest>> open_requests() const;
  // Looks at the list of workers again and again, on the parser's thread.
  void watch_list();
  void look_at_list();
  void take_list(const ListedWorkers& listed);
  void take(WorkerGroup& group, const std::vector<http::HttpUrl>& listed);
  void proxy(const Exchange& exchange);
  void ask_next(const Exchange& exchange, std::vector<size_t> left);
  json health_page(bool* usable);
  std::string metrics_page();

  const RouterOptions options;
  // Bytes of unanswered requests; exchanges may outlive the router.
  const std::shared_ptr<std::atomic<size_t>> body_bytes = std::make_shared<std::atomic<size_t>>(0);
  http::HttpListener listener;
  Workers workers;
  HealthWatch health;
  std::atomic<bool> ends{false};  // it drains
  std::string last_list;          // for the parser's thread
  std::unique_ptr<http::EventLoop::Timer> next_look;
  http::TaskThread parser;  // of bodies, which may be long
};

Exchange Router::Impl::admit(const Exchange& exchange) {
  const size_t size = exchange->request().body.size();
  const size_t held = body_bytes->load();
  if (held != 0 && held + size > options.max_bodies) {
    http::reply_error(
        absl::ResourceExhaustedError(absl::StrCat(
            "the router holds ", held >> 20, " MiB of requests that are not answered yet, and ",
            options.max_bodies >> 20, " MiB is its limit: try again later")),
        exchange.get());
    return nullptr;
  }
  *body_bytes += size;
  return {exchange.get(),
          [held = Exchange(exchange), bytes = body_bytes, size](http::HttpExchange*) mutable {
            held.reset();
            *bytes -= size;
          }};
}

void Router::Impl::complete(const Exchange& exchange, bool chat) {
  absl::StatusOr<json> body = parse_json(exchange->request().body, "the request body");
  if (!body.ok()) return http::reply_error(body.status(), exchange.get());
  absl::StatusOr<http::ApiRequest> parsed = http::read_api_request(*body, chat);
  if (!parsed.ok()) return http::reply_error(parsed.status(), exchange.get());
  if (parsed->hand_over.has_value() || parsed->remote_prefill.has_value()) {
    return http::reply_error(
        absl::InvalidArgumentError("the router chooses prefill itself: leave do_remote_decode and "
                                   "do_remote_prefill out, or ask a worker that has --kv-agent"),
        exchange.get());
  }
  auto request = std::make_shared<http::ApiRequest>(*std::move(parsed));
  if (!request->has_seed) request->sampling.seed = std::random_device()();
  auto posted = std::make_shared<const WorkerBody>(*std::move(body), *request);
  std::vector<std::shared_ptr<const PromptKey>> keys;
  for (const http::ApiPrompt& prompt : request->prompts) {
    const std::vector<int32_t>& ids = prompt.tokens;
    const std::string_view bytes(reinterpret_cast<const char*>(ids.data()),
                                 ids.size() * sizeof(int32_t));
    keys.push_back(
        std::make_shared<PromptKey>(prompt_key(ids.empty() ? prompt.text : bytes, ids.size())));
  }
  listener.loop()->post(
      [this, exchange, posted = std::move(posted), request, keys = std::move(keys)]() mutable {
        RelayedRequest::start(workers, exchange, std::move(posted), std::move(request), keys,
                              exchange->request_id());
      });
}

void Router::Impl::watch_list() {
  if (options.workers_file.empty()) return;
  next_look = listener.loop()->after(options.health_interval, [this] {
    // If the parser is too busy to look, it looks later.
    if (!parser.post([this] { look_at_list(); })) watch_list();
  });
}

void Router::Impl::look_at_list() {
  const absl::StatusOr<std::string> text = read_file(options.workers_file, kMaxListBytes);
  // Handles each new text once, and logs each new error once.
  std::string seen = text.ok() ? *text : std::string(text.status().message());
  std::optional<ListedWorkers> listed;
  if (seen != last_list) {
    absl::StatusOr<ListedWorkers> parsed =
        text.ok() ? parse_worker_list(*text) : absl::StatusOr<ListedWorkers>(text.status());
    if (parsed.ok()) {
      listed = *std::move(parsed);
    } else {
      base::log_event(base::LogLevel::kError,
                      "router: the workers stay as they are, because %s is invalid: %s",
                      options.workers_file, std::string(parsed.status().message()));
    }
    last_list = std::move(seen);
  }
  listener.loop()->post([this, listed = std::move(listed)] {
    if (listed.has_value()) take_list(*listed);
    watch_list();
  });
}

void Router::Impl::take_list(const ListedWorkers& listed) {
  take(workers.prefill, listed.prefill);
  take(workers.decode, listed.decode);
}

void Router::Impl::take(WorkerGroup& group, const std::vector<http::HttpUrl>& listed) {
  for (size_t i = 0; i < group.size(); ++i) {
    KnownWorker& worker = group[i];
    const bool gone = std::find(listed.begin(), listed.end(), worker.url) == listed.end();
    if (gone == worker.gone) continue;
    worker.gone = gone;
    if (!gone) worker.up = false;  // until it answers
    base::log_event(base::LogLevel::kInfo, "router: %s worker %s %s", group.role, worker.name(),
                    gone ? "gets nothing new" : "is back");
  }
  for (const http::HttpUrl& url : listed) {
    if (std::any_of(group.begin(), group.end(),
                    [&](const KnownWorker& known) { return known.url == url; })) {
      continue;
    }
    group.add(url);
    base::log_event(base::LogLevel::kInfo, "router: %s worker %s joins", group.role, url.text());
  }
}

std::vector<std::shared_ptr<RelayedRequest>> Router::Impl::open_requests() const {
  std::vector<std::shared_ptr<RelayedRequest>> open;
  for (RelayedRequest* request : workers.open) open.push_back(request->shared_from_this());
  return open;
}

void Router::Impl::went_down(WorkerGroup& group, size_t worker) {
  const bool is_decode = &group == &workers.decode;
  if (!is_decode) group[worker].agent = {};  // it may come back with another one
  for (const auto& request : open_requests()) {
    is_decode ? request->leave_worker(worker) : request->leave_prefill(worker);
  }
}

// Sends a request that any worker can answer to one worker after the other: to the healthy ones, or
// if there are none, to those that may have recovered.
void Router::Impl::proxy(const Exchange& exchange) {
  std::vector<size_t> well, down;
  for (size_t i = 0; i < workers.decode.size(); ++i) {
    const KnownWorker& worker = workers.decode[i];
    if (!worker.gone) (worker.up ? well : down).push_back(i);
  }
  ask_next(exchange, well.empty() ? std::move(down) : std::move(well));
}

void Router::Impl::ask_next(const Exchange& exchange, std::vector<size_t> left) {
  if (exchange->gone()) return;
  if (left.empty()) {
    return http::reply_error(absl::UnavailableError("no decode worker answers"), exchange.get());
  }
  struct Answer {
    int status = 0;
    std::string body;
    std::unique_ptr<http::HttpFetch> fetch;
  };
  const auto answer = std::make_shared<Answer>();
  http::HttpFetchRequest ask{.url = workers.decode[left.front()].url,
                             .method = exchange->request().method,
                             .path = exchange->request().path,
                             .body = {http::SharedBytes(exchange, &exchange->request().body)},
                             .headers = workers.headers(),
                             .trust = workers.trust,
                             .connect_timeout = options.health_timeout,
                             .timeout = options.health_timeout * 5};
  left.erase(left.begin());
  ask.headers.emplace_back("Content-Type", "application/json");
  answer->fetch = http::HttpFetch::start(
      listener.loop(), std::move(ask),
      {.on_head = [answer](int status, std::string_view) { answer->status = status; },
       .on_body = [answer](std::string_view bytes) { answer->body += bytes; },
       .on_end =
           [this, answer, exchange, left = std::move(left)](const absl::Status& status) {
             // It holds what is running now.
             const std::unique_ptr<http::HttpFetch> ended = std::move(answer->fetch);
             if (!status.ok()) return ask_next(exchange, left);
             exchange->reply(answer->status, "application/json", answer->body);
           }});
}

json Router::Impl::health_page(bool* usable) {
  json list = json::array();
  *usable = false;
  for (const WorkerGroup* group : {&workers.decode, &workers.prefill}) {
    for (const KnownWorker& worker : *group) {
      if (!worker.is_listed()) continue;
      const bool draining = worker.is_draining();
      *usable |= worker.up && !draining && group == &workers.decode;
      list.push_back({{"url", worker.name()}, {"role", group->role}, {"up", worker.up}});
      const std::string& model = worker.model.empty() ? worker.serves : worker.model;
      if (!model.empty()) list.back()["model"] = model;
      if (!worker.up) list.back()["why"] = worker.why_down;
      if (!worker.up && !worker.answered) list.back()["looks"] = worker.looks;
      if (draining) list.back()["draining"] = true;
    }
  }
  json page = {{"status", *usable ? "ok" : "no decode worker is up"}, {"workers", std::move(list)}};
  if (ends) {
    *usable = false;
    page["status"] = "draining";
    page["draining"] = true;
  }
  return page;
}

std::string Router::Impl::metrics_page() {
  std::string page = worker_metrics(workers);
  serve::PrometheusPage out("baton_router_", &page);
  const auto count = [&](const char* name, const char* help, uint64_t value) {
    out.single(name, help, "counter", value);
  };
  count("retries_total", "Choices that another worker was asked to continue.", workers.retried);
  count("handed_over_total", "Prompts whose KV decode was told to fetch by kv_transfer_params.",
        workers.handed_over);
  count("not_handed_over_total", "Prompts that prefill was asked for and decode computed.",
        workers.not_handed_over);
  http::print_connections(listener.stats(), &page);
  return page;
}

void Router::Impl::register_routes() {
  listener.set_filter([this](const Exchange& exchange) {
    http::mark_request(exchange.get());
    return !http::check_api_key(options.api_key, exchange.get());
  });
  for (const bool chat : {false, true}) {
    listener.route("POST", chat ? "/v1/chat/completions" : "/v1/completions",
                   [this, chat](const Exchange& asked) {
                     const Exchange exchange = admit(asked);
                     if (exchange == nullptr) return;
                     if (parser.post([this, exchange, chat] { complete(exchange, chat); })) return;
                     http::reply_error(
                         absl::ResourceExhaustedError("too many requests wait to be read"),
                         exchange.get());
                   });
  }
  const http::HttpHandler ask_a_worker = [this](const Exchange& asked) {
    if (const Exchange exchange = admit(asked); exchange != nullptr) proxy(exchange);
  };
  listener.route("GET", "/v1/models", ask_a_worker);
  listener.route("GET", "/v1/models/", ask_a_worker);
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

void Router::drain() {
  impl_->ends = true;
  impl_->listener.drain(http::always_answered());
}
bool Router::drained() const { return impl_->listener.unanswered() == 0; }
void Router::end_requests() {
  impl_->listener.loop()->post([router = impl_.get()] {
    router->workers.ending = true;
    for (const auto& request : router->open_requests()) request->end_early();
  });
}

int Router::port() const { return impl_->listener.port(); }

absl::StatusOr<std::unique_ptr<Router>> Router::start(RouterOptions options) {
  std::string list;
  ListedWorkers listed;
  if (!options.workers_file.empty()) {
    if (!options.decode.empty() || !options.prefill.empty()) {
      return absl::InvalidArgumentError(
          "--workers lists all workers: leave --prefill and --decode out");
    }
    absl::StatusOr<std::string> text = read_file(options.workers_file, kMaxListBytes);
    if (!text.ok()) return text.status();
    absl::StatusOr<ListedWorkers> parsed = parse_worker_list(*text);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(options.workers_file, ": ", std::string(parsed.status().message())));
    }
    listed = *std::move(parsed);
    list = *std::move(text);
  } else {
    if (options.decode.empty()) {
      return absl::InvalidArgumentError("a router needs at least one --decode URL");
    }
    auto prefill = parse_urls(options.prefill);
    if (!prefill.ok()) return prefill.status();
    auto decode = parse_urls(options.decode);
    if (!decode.ok()) return decode.status();
    listed = {*std::move(prefill), *std::move(decode)};
  }
  std::shared_ptr<http::HttpTrust> trust;
  if (!options.worker_ca.empty()) {
    auto loaded = http::load_trust(options.worker_ca);
    if (!loaded.ok()) return loaded.status();
    trust = *std::move(loaded);
  }
  auto impl = std::make_unique<Impl>(std::move(options), std::move(listed.prefill),
                                     std::move(listed.decode));
  impl->workers.trust = std::move(trust);
  impl->last_list = std::move(list);
  impl->register_routes();
  absl::Status status = impl->listener.listen(impl->options.host, impl->options.port);
  if (!status.ok()) return status;
  // The first requests should find the workers known.
  std::promise<void> known;
  impl->listener.loop()->post([router = impl.get(), &known] {
    router->watch_list();
    router->health.probe_all([router, &known] {
      known.set_value();
      router->health.run();
    });
  });
  known.get_future().wait();
  return std::unique_ptr<Router>(new Router(std::move(impl)));
}

}  // namespace baton::engine::router
