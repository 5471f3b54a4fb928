// The router: picks workers, relays, retries; a thread watches the workers' health.
#include "engine/router/router.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "engine/http/http_listener.h"
#include "engine/http/openai_reply.h"
#include "engine/router/stream_relay.h"
#include "engine/router/worker_picker.h"

namespace baton::engine::router {
namespace {

using nlohmann::json;

// Holds a place with a worker for as long as it lives.
class Place {
 public:
  Place(WorkerPicker& picker, std::optional<size_t> worker) : picker_(picker), worker_(worker) {}
  ~Place() { release(); }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  bool has_value() const { return worker_.has_value(); }
  size_t operator*() const { return *worker_; }
  void release() {
    if (worker_.has_value()) picker_.release(*worker_);
    worker_.reset();
  }

 private:
  WorkerPicker& picker_;
  std::optional<size_t> worker_;
};

std::string prompt_bytes(const http::ApiRequest& request) {
  if (request.prompt_tokens.empty()) return request.prompt;
  return {reinterpret_cast<const char*>(request.prompt_tokens.data()),
          request.prompt_tokens.size() * sizeof(int32_t)};
}

}  // namespace

struct Router::Impl {
  explicit Impl(RouterOptions given)
      : options(std::move(given)),
        prefills(options.prefill.size()),
        decodes(options.decode.size()),
        addresses(options.prefill.size()),
        listener(options.connections) {}
  ~Impl() {
    listener.stop();
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    if (health_thread.joinable()) health_thread.join();
  }

  void register_handlers();
  void complete(const httplib::Request& http, httplib::Response& response, bool chat);
  absl::Status relay(StreamRelay& relay, const std::string& path,
                     const std::vector<serve::BlockHash>& chain);
  absl::Status attempt(StreamRelay& relay, const std::string& path, size_t decode, Place& prefill);
  void check_health();
  void proxy_models(httplib::Response& response);

  const RouterOptions options;
  WorkerPicker prefills, decodes;
  std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  std::vector<std::string> addresses;  // of the prefill workers' connectors; "" while unknown
  http::HttpListener listener;
  std::thread health_thread;
};

// One stream from one decode worker, until it ends one way or the other.
absl::Status Router::Impl::attempt(StreamRelay& relay, const std::string& path, size_t decode,
                                   Place& prefill) {
  std::string address;
  if (prefill.has_value() && prefills.is_up(*prefill)) {
    const std::lock_guard lock(mutex);
    address = addresses[*prefill];
  }
  httplib::Client client(options.decode[decode]);
  client.set_connection_timeout(std::chrono::seconds(5));
  client.set_read_timeout(options.read_timeout);
  client.set_tcp_nodelay(true);
  const size_t before = relay.tokens_seen();
  httplib::Request request;
  request.method = "POST";
  request.path = path;
  request.set_header("Content-Type", "application/json");
  request.body = relay.next_body(address);
  int status = 0;
  std::string error_body;
  request.response_handler = [&](const httplib::Response& response) {
    status = response.status;
    return true;
  };
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    if (listener.stopping()) return false;
    if (status != 200) {
      error_body.append(data, size);
      return error_body.size() < 65536;
    }
    const bool go_on = relay.receive({data, size});
    if (relay.tokens_seen() > before) prefill.release();  // its part is over
    return go_on;
  };
  const httplib::Result result = client.send(request);
  if (relay.done()) return absl::OkStatus();
  if (relay.client_gone()) return absl::CancelledError("the client went away");
  if (!relay.worker_error().ok()) return relay.worker_error();
  if (status != 0 && status != 200) {
    const absl::StatusOr<json> parsed = parse_json(error_body, "a worker's reply");
    const auto message = parsed.ok() ? string_field(member(*parsed, "error"), "message", "")
                                     : absl::StatusOr<std::string>(parsed.status());
    const std::string text = message.ok() ? *message : absl::StrCat("HTTP status ", status);
    return status < 500 ? absl::InvalidArgumentError(text) : absl::UnavailableError(text);
  }
  decodes.set_up(decode, false);
  return absl::UnavailableError(absl::StrCat(
      "decode worker ", options.decode[decode],
      " broke off: ", result ? "the stream ended early" : httplib::to_string(result.error())));
}

// Worker after worker, until the stream is done or there is no progress any more.
absl::Status Router::Impl::relay(StreamRelay& relay, const std::string& path,
                                 const std::vector<serve::BlockHash>& chain) {
  absl::Status status;
  std::vector<size_t> failed;
  for (int retries = 0; retries <= options.max_retries; ++retries) {
    const size_t before = relay.tokens_seen();
    Place prefill(prefills, prefills.pick(chain));
    Place decode(decodes, decodes.pick(chain, failed));
    status = attempt(relay, path, *decode, prefill);
    if (status.code() != absl::StatusCode::kUnavailable || listener.stopping()) return status;
    failed.push_back(*decode);
    if (relay.tokens_seen() > before) retries = 0;
  }
  return absl::UnavailableError(absl::StrCat("gave up after ", options.max_retries,
                                             " retries; the last: ", status.message()));
}

void Router::Impl::complete(const httplib::Request& http, httplib::Response& response, bool chat) {
  const absl::StatusOr<json> body = parse_json(http.body, "the request body");
  if (!body.ok()) return http::reply_error(body.status(), &response);
  const absl::StatusOr<http::ApiRequest> request = http::read_api_request(*body, chat);
  if (!request.ok()) return http::reply_error(request.status(), &response);
  const std::vector<serve::BlockHash> chain = prompt_chain(prompt_bytes(*request));
  const std::string path = http.path;
  if (!request->stream) {
    StreamRelay stream(*body, *request, nullptr);
    const absl::Status status = relay(stream, path, chain);
    if (!status.ok()) return http::reply_error(status, &response);
    response.set_content(stream.whole(), "application/json");
    return;
  }
  response.set_chunked_content_provider(
      "text/event-stream",
      [this, body = *body, request = *request, path, chain](size_t, httplib::DataSink& sink) {
        StreamRelay stream(body, request, [&sink](std::string_view bytes) {
          return sink.is_writable() && sink.write(bytes.data(), bytes.size());
        });
        const absl::Status status = relay(stream, path, chain);
        if (stream.client_gone()) return false;
        if (!status.ok()) {
          const std::string error = absl::StrCat("data: ", http::api_error(status), "\n\n");
          sink.write(error.data(), error.size());
        }
        sink.done();
        return true;
      });
}

void Router::Impl::check_health() {
  const auto get = [](const std::string& url, const char* path) -> std::optional<std::string> {
    httplib::Client client(url);
    client.set_connection_timeout(std::chrono::seconds(1));
    client.set_read_timeout(std::chrono::seconds(2));
    const httplib::Result result = client.Get(path);
    if (!result || result->status != 200) return std::nullopt;
    return result->body;
  };
  for (size_t i = 0; i < options.decode.size(); ++i) {
    decodes.set_up(i, get(options.decode[i], "/health").has_value());
  }
  for (size_t i = 0; i < options.prefill.size(); ++i) {
    const std::optional<std::string> reply = get(options.prefill[i], "/v1/baton/address");
    std::string address;
    if (reply.has_value()) {
      const absl::StatusOr<json> parsed = parse_json(*reply, "a prefill worker's address");
      if (parsed.ok()) address = string_field(*parsed, "address", "").value_or("");
    }
    prefills.set_up(i, !address.empty());
    const std::lock_guard lock(mutex);
    addresses[i] = address;
  }
}

void Router::Impl::proxy_models(httplib::Response& response) {
  for (const std::string& url : options.decode) {
    httplib::Client client(url);
    client.set_connection_timeout(std::chrono::seconds(1));
    if (const httplib::Result result = client.Get("/v1/models"); result) {
      response.set_content(result->body, "application/json");
      return;
    }
  }
  http::reply_error(absl::UnavailableError("no decode worker answers"), &response);
}

void Router::Impl::register_handlers() {
  using HttpRequest = httplib::Request;
  using HttpResponse = httplib::Response;
  httplib::Server& server = listener.server();
  server.Post("/v1/completions", [this](const HttpRequest& request, HttpResponse& response) {
    complete(request, response, false);
  });
  server.Post("/v1/chat/completions", [this](const HttpRequest& request, HttpResponse& response) {
    complete(request, response, true);
  });
  server.Get("/v1/models",
             [this](const HttpRequest&, HttpResponse& response) { proxy_models(response); });
  server.Get("/health", [this](const HttpRequest&, HttpResponse& response) {
    json workers = json::array();
    bool usable = false;
    for (size_t i = 0; i < options.decode.size(); ++i) {
      usable |= decodes.is_up(i);
      workers.push_back({{"url", options.decode[i]}, {"role", "decode"}, {"up", decodes.is_up(i)}});
    }
    for (size_t i = 0; i < options.prefill.size(); ++i) {
      workers.push_back(
          {{"url", options.prefill[i]}, {"role", "prefill"}, {"up", prefills.is_up(i)}});
    }
    response.status = usable ? 200 : 503;
    response.set_content(
        json{{"status", usable ? "ok" : "no decode worker is up"}, {"workers", workers}}.dump(),
        "application/json");
  });
  server.Get("/metrics", [this](const HttpRequest&, HttpResponse& response) {
    std::string page = "# TYPE baton_router_in_flight gauge\n# TYPE baton_router_worker_up gauge\n";
    const auto print = [&](const WorkerPicker& picker, const std::vector<std::string>& urls) {
      for (size_t i = 0; i < urls.size(); ++i) {
        absl::StrAppend(&page, "baton_router_in_flight{worker=\"", urls[i], "\"} ",
                        picker.in_flight(i), "\nbaton_router_worker_up{worker=\"", urls[i], "\"} ",
                        picker.is_up(i) ? 1 : 0, "\n");
      }
    };
    print(decodes, options.decode);
    print(prefills, options.prefill);
    response.set_content(page, "text/plain; version=0.0.4");
  });
}

Router::Router(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Router::~Router() = default;
int Router::port() const { return impl_->listener.port(); }

absl::StatusOr<std::unique_ptr<Router>> Router::start(RouterOptions options) {
  if (options.decode.empty()) {
    return absl::InvalidArgumentError("a router needs at least one --decode URL");
  }
  for (const std::vector<std::string>* urls : {&options.prefill, &options.decode}) {
    for (const std::string& url : *urls) {
      if (!url.starts_with("http://") || !httplib::Client(url).is_valid()) {
        return absl::InvalidArgumentError(
            absl::StrCat("\"", url, "\" is not a URL such as http://127.0.0.1:8001"));
      }
    }
  }
  auto impl = std::make_unique<Impl>(std::move(options));
  impl->check_health();
  impl->register_handlers();
  absl::Status status = impl->listener.listen(impl->options.host, impl->options.port);
  if (!status.ok()) return status;
  impl->health_thread = std::thread([router = impl.get()] {
    std::unique_lock lock(router->mutex);
    while (!router->wake.wait_for(lock, router->options.health_interval,
                                  [router] { return router->stopping; })) {
      lock.unlock();
      router->check_health();
      lock.lock();
    }
  });
  return std::unique_ptr<Router>(new Router(std::move(impl)));
}

}  // namespace baton::engine::router
