// Accepting connections, routing requests, and the two ends of an exchange.
#include "engine/http/http_listener.h"

#include <sys/resource.h>

#include <algorithm>
#include <future>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "engine/http/http_connection.h"
#include "engine/http/openai/openai_reply.h"
#include "engine/serve/liveness.h"
#include "transport/net/endpoint.h"

namespace baton::engine::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr std::chrono::milliseconds kAcceptAgain{50};
constexpr size_t kOtherFiles = 256;  // model, rails, workers: not for clients' connections

const char* phrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 502:
      return "Bad Gateway";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return status < 500 ? "Refused" : "Internal Server Error";
  }
}

// Connections cost a file each: as many as this process may have open.
size_t connections_possible(size_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  if (limit.rlim_cur < limit.rlim_max) {
    rlimit raised = limit;
    raised.rlim_cur = std::min<rlim_t>(
        limit.rlim_max,
        std::max<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(wanted + kOtherFiles)));
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  const size_t files = static_cast<size_t>(std::min<rlim_t>(limit.rlim_cur, 1 << 20));
  return std::min(wanted, files > 2 * kOtherFiles ? files - kOtherFiles : files / 2);
}

}  // namespace

std::string_view HttpRequest::header(std::string_view lower_case_name) const {
  const auto it = headers.find(std::string(lower_case_name));
  return it == headers.end() ? std::string_view() : std::string_view(it->second);
}

std::string authority(std::string_view host, std::string_view port) {
  const bool brackets = host.find(':') != std::string_view::npos;
  return absl::StrCat(brackets ? "[" : "", std::string(host), brackets ? "]" : "", ":",
                      std::string(port));
}

HttpExchange::HttpExchange(std::weak_ptr<EventLoop> loop, std::weak_ptr<HttpConnection> connection,
                           HttpRequest request, bool keep_alive, bool chunked)
    : loop_(std::move(loop)),
      connection_(std::move(connection)),
      request_(std::move(request)),
      keep_alive_(keep_alive),
      chunked_(chunked) {}

HttpExchange::~HttpExchange() {
  if (ended_ || gone_) return;
  if (!begun_) {
    reply_error(absl::InternalError("the request was not answered"), this);
    return;
  }
  const auto loop = loop_.lock();
  if (loop == nullptr) return;
  loop->dispatch([weak = connection_] {
    if (const auto connection = weak.lock(); connection != nullptr) connection->close();
  });
}

void HttpExchange::add_header(std::string name, std::string value) {
  headers_.emplace_back(std::move(name), std::move(value));
}

std::string HttpExchange::head(int status, std::string_view content_type,
                               const HttpHeaders& headers) const {
  std::string out = absl::StrCat("HTTP/1.1 ", status, " ", phrase(status), "\r\n",
                                 "Content-Type: ", std::string(content_type), "\r\n");
  for (const HttpHeaders* list : {&headers_, &headers}) {
    for (const auto& [name, value] : *list) absl::StrAppend(&out, name, ": ", value, "\r\n");
  }
  return out;
}

void HttpExchange::send(std::string bytes, bool last, bool close) {
  const auto loop = loop_.lock();
  if (loop == nullptr || gone_) return;
  loop->dispatch([weak = connection_, bytes = std::move(bytes), last, close]() mutable {
    if (const auto connection = weak.lock(); connection != nullptr) {
      connection->send(std::move(bytes), last, close);
    }
  });
}

void HttpExchange::reply(int status, std::string_view content_type, const std::string& body,
                         const HttpHeaders& headers) {
  if (begun_.exchange(true)) return;
  ended_ = true;
  std::string bytes = head(status, content_type, headers);
  absl::StrAppend(&bytes, "Content-Length: ", body.size(),
                  "\r\nConnection: ", keep_alive_ ? "keep-alive" : "close", "\r\n\r\n");
  if (request_.method != "HEAD") bytes += body;
  send(std::move(bytes), true, !keep_alive_);
}

void HttpExchange::begin(int status, std::string_view content_type, const HttpHeaders& headers) {
  if (begun_.exchange(true)) return;
  std::string bytes = head(status, content_type, headers);
  absl::StrAppend(&bytes, "Cache-Control: no-cache\r\n",
                  chunked_ ? "Transfer-Encoding: chunked\r\n" : "",
                  "Connection: ", keep_alive_ && chunked_ ? "keep-alive" : "close", "\r\n\r\n");
  send(std::move(bytes), false, false);
}

void HttpExchange::write(std::string bytes) {
  if (bytes.empty() || ended_ || request_.method == "HEAD") return;
  if (chunked_) bytes = absl::StrCat(absl::Hex(bytes.size()), "\r\n", bytes, "\r\n");
  send(std::move(bytes), false, false);
}

void HttpExchange::end() {
  if (ended_.exchange(true)) return;
  // Without chunks the end of the connection is the end of the answer.
  const bool any_body = request_.method != "HEAD";
  send(chunked_ && any_body ? "0\r\n\r\n" : "", true, !keep_alive_ || !chunked_);
}

void HttpExchange::on_gone(std::function<void()> task) {
  const auto loop = loop_.lock();
  if (loop == nullptr) return;
  loop->dispatch([self = weak_from_this(), weak = connection_, task = std::move(task)] {
    if (const auto exchange = self.lock(); exchange == nullptr || exchange->ended_) return;
    const auto connection = weak.lock();
    if (connection == nullptr) return task();
    connection->on_gone(task);
  });
}

void reply_error(const absl::Status& status, HttpExchange* exchange) {
  HttpHeaders headers;
  const auto seconds = status.GetPayload(kRetryAfterPayload);
  if (seconds.has_value() || http_status(status) == 429) {
    headers.emplace_back("Retry-After", seconds.has_value() ? std::string(*seconds) : "1");
  }
  exchange->reply(http_status(status), "application/json", api_error(status), headers);
}

struct HttpListener::Impl : std::enable_shared_from_this<HttpListener::Impl> {
  Impl(std::shared_ptr<EventLoop> event_loop, HttpListenerOptions options)
      : loop(std::move(event_loop)),
        acceptor(loop->context()),
        host(std::make_shared<ConnectionHost>()) {
    host->options = std::move(options);
    host->loop = loop;
  }

  void accept();
  void make_room();
  void accepted(error_code error, asio::ip::tcp::socket socket);
  void handle(const std::shared_ptr<HttpExchange>& exchange);
  bool refuse_while_draining(HttpExchange* exchange) const;
  bool answer_head(const std::shared_ptr<HttpExchange>& exchange);
  bool answer_preflight(HttpExchange* exchange);

  const std::shared_ptr<EventLoop> loop;
  asio::ip::tcp::acceptor acceptor;
  const std::shared_ptr<ConnectionHost> host;
  std::unique_ptr<EventLoop::Timer> pause;
  absl::flat_hash_map<std::string, absl::flat_hash_map<std::string, HttpHandler>> routes;
  std::function<bool(const std::shared_ptr<HttpExchange>&)> filter;
  std::vector<std::string> still_answered;  // while it drains
  std::shared_ptr<const HttpTls> tls;
  int port = 0;
  bool stopped = false;
};

void HttpListener::Impl::accept() {
  acceptor.async_accept([this](error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    accepted(error, std::move(socket));
  });
}

// Closes the connection that has kept us waiting for longest.
void HttpListener::Impl::make_room() {
  HttpConnection* reading = host->reading.empty() ? nullptr : host->reading.front();
  const Time now = host->options.clock->now();
  HttpConnection* unread = nullptr;
  for (size_t left = host->writing.size(); left > 0 && unread == nullptr; --left) {
    HttpConnection* const first = host->writing.front();
    if (now - first->waits_since() < host->options.unread_after) break;
    if (!first->moves()) unread = first;  // else it is the last one of the list now
  }
  if (unread != nullptr && (reading == nullptr || unread->waits_since() < reading->waits_since())) {
    return unread->close();
  }
  if (reading != nullptr) reading->close();
}

void HttpListener::Impl::accepted(error_code error, asio::ip::tcp::socket socket) {
  if (error || host->all.size() >= host->options.max_connections) {
    ++host->refused;
    make_room();
  }
  if (error) {  // no file left, perhaps: asking again at once would be asked for ever
    pause = loop->after(kAcceptAgain, [this] { accept(); });
    return;
  }
  if (host->all.size() < host->options.max_connections) {
    auto wrapped = tls != nullptr ? tls->wrap(std::move(socket)) : plain_socket(std::move(socket));
    std::make_shared<HttpConnection>(std::move(wrapped), host)->start();
  }
  accept();
}

// Looks at a request before its body is read. True: it has been answered.
bool HttpListener::Impl::answer_head(const std::shared_ptr<HttpExchange>& exchange) {
  return answer_preflight(exchange.get()) || (filter && filter(exchange)) ||
         refuse_while_draining(exchange.get());
}

bool HttpListener::Impl::refuse_while_draining(HttpExchange* exchange) const {
  if (!host->draining) return false;
  const std::string& path = exchange->request().path;
  if (std::find(still_answered.begin(), still_answered.end(), path) != still_answered.end()) {
    return false;
  }
  absl::Status status = serve::stopped_status("this server is shutting down: ask another one");
  status.SetPayload(kRetryAfterPayload, absl::Cord("1"));
  reply_error(status, exchange);
  return true;
}

// CORS: tells a browser which pages may read the answer, and which requests they may send.
bool HttpListener::Impl::answer_preflight(HttpExchange* exchange) {
  const std::vector<std::string>& allowed = host->options.allowed_origins;
  const HttpRequest& request = exchange->request();
  const std::string_view origin = request.header("origin");
  if (allowed.empty() || origin.empty()) return false;
  const bool any = std::find(allowed.begin(), allowed.end(), "*") != allowed.end();
  if (!any) {
    exchange->add_header("Vary", "Origin");
    if (std::find(allowed.begin(), allowed.end(), origin) == allowed.end()) return false;
  }
  exchange->add_header("Access-Control-Allow-Origin", any ? "*" : std::string(origin));
  exchange->add_header("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
  const std::string_view method = request.header("access-control-request-method");
  if (request.method != "OPTIONS" || method.empty()) return false;
  const std::string_view headers = request.header("access-control-request-headers");
  exchange->reply(200, "text/plain", "",
                  {{"Access-Control-Allow-Methods", "GET, POST, HEAD, OPTIONS"},
                   {"Access-Control-Allow-Headers",
                    headers.empty() ? "Authorization, Content-Type" : std::string(headers)},
                   {"Access-Control-Max-Age", "600"}});
  return true;
}

void HttpListener::Impl::handle(const std::shared_ptr<HttpExchange>& exchange) {
  if (refuse_while_draining(exchange.get())) return;  // its body came later
  const HttpRequest& request = exchange->request();
  auto path = routes.find(request.path);
  // The nearest above it.
  for (size_t end = request.path.size(); path == routes.end() && end > 1;) {
    end = request.path.rfind('/', end - 2) + 1;
    if (end == 0) break;
    path = routes.find(request.path.substr(0, end));
  }
  if (path == routes.end()) {
    return exchange->reply(404, "application/json",
                           api_error(404, absl::StrCat("there is nothing at ", request.path)));
  }
  const auto handler = path->second.find(request.method == "HEAD" ? "GET" : request.method);
  if (handler == path->second.end()) {
    std::string allowed;
    for (const auto& [method, unused] : path->second) {
      absl::StrAppend(&allowed, allowed.empty() ? "" : ", ", method);
    }
    return exchange->reply(
        405, "application/json",
        api_error(405, absl::StrCat(request.path, " takes ", allowed, ", not ", request.method)),
        {{"Allow", allowed}});
  }
  handler->second(exchange);
}

HttpListener::HttpListener(HttpListenerOptions options)
    : loop_(std::make_shared<EventLoop>()),
      impl_(std::make_shared<Impl>(loop_, std::move(options))) {
  impl_->host->handle = [impl = impl_.get()](const std::shared_ptr<HttpExchange>& exchange) {
    impl->handle(exchange);
  };
  impl_->host->filter = [impl = impl_.get()](const std::shared_ptr<HttpExchange>& exchange) {
    return impl->answer_head(exchange);
  };
}

HttpListener::~HttpListener() { stop(); }

void HttpListener::route(const std::string& method, const std::string& path, HttpHandler handler) {
  impl_->routes[path][method] = std::move(handler);
}

void HttpListener::set_filter(std::function<bool(const std::shared_ptr<HttpExchange>&)> filter) {
  impl_->filter = std::move(filter);
}

absl::Status HttpListener::listen(const std::string& host, int port) {
  const HttpListenerOptions& options = impl_->host->options;
  if (options.tls_certificate.empty() != options.tls_key.empty()) {
    return absl::InvalidArgumentError("TLS needs both a certificate and its key");
  }
  if (!options.tls_key.empty()) {
    auto tls = HttpTls::load(options.tls_certificate, options.tls_key);
    if (!tls.ok()) return tls.status();
    impl_->tls = *std::move(tls);
  }
  const auto listening = net::listen_on(host, static_cast<uint16_t>(port), {.buffer_bytes = 0});
  if (!listening.ok()) {
    return absl::Status(listening.status().code(), absl::StrCat("serving HTTP (--host, --port): ",
                                                                listening.status().message()));
  }
  const bool ipv6 = net::local_of(*listening).storage.ss_family == AF_INET6;
  auto& acceptor = impl_->acceptor;
  error_code error;
  acceptor.assign(ipv6 ? asio::ip::tcp::v6() : asio::ip::tcp::v4(), *listening, error);
  if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat(
        "serving HTTP on ", authority(host, std::to_string(port)), " failed: ", error.message()));
  }
  impl_->port = acceptor.local_endpoint(error).port();
  size_t& connections = impl_->host->options.max_connections;
  connections = connections_possible(connections);
  impl_->accept();
  loop_->start();
  return absl::OkStatus();
}

int HttpListener::port() const { return impl_->port; }

void HttpListener::drain(std::vector<std::string> still_answered) {
  loop_->post([impl = impl_, paths = std::move(still_answered)] {
    impl->still_answered = paths;
    impl->host->draining = true;
  });
}

size_t HttpListener::unanswered() const { return impl_->host->answering; }

void HttpListener::stop() {
  if (std::exchange(impl_->stopped, true)) return;
  if (impl_->port != 0) {
    std::promise<void> closed;
    loop_->post([this, &closed] {
      error_code ignored;
      impl_->acceptor.close(ignored);
      impl_->pause.reset();
      while (!impl_->host->all.empty()) {
        const std::shared_ptr<HttpConnection> connection = impl_->host->all.front();
        connection->close();
      }
      closed.set_value();
    });
    closed.get_future().wait();
  }
  loop_->stop();
}

HttpListenerStats HttpListener::stats() const {
  const ConnectionHost& host = *impl_->host;
  return {host.connections, host.answering, host.refused, host.timed_out};
}

}  // namespace baton::engine::http
