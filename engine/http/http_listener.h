// An event-driven HTTP/1.1 server: thousands of open connections on one thread.
//
//   HttpListener listener({.head_timeout = 10s});
//   listener.route("GET", "/health", [](const std::shared_ptr<HttpExchange>& exchange) {
//     exchange->reply(200, "application/json", "{}");
//   });
//   listener.listen("127.0.0.1", 8000);
//
// A handler may answer later and from any thread: it keeps the exchange. A client that leaves
// before it was answered is noticed at once. Strangers cannot hold anything up: what is half sent,
// or not read, has a deadline and a size limit, and makes room for others when there are too many
// connections.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/http/event_loop.h"
#include "transport/clock.h"

namespace baton::engine::http {

struct HttpRequest {
  std::string method;
  std::string path;  // without what follows a "?"
  std::string body;
  absl::flat_hash_map<std::string, std::string> headers;  // names in lower case

  // The header's value; "" if the request does not have it.
  std::string_view header(std::string_view lower_case_name) const;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

class HttpConnection;

// One request and its answer. Thread-safe. If the last owner lets go of it without an answer, the
// client gets a 500; half-way through a stream, a broken connection.
class HttpExchange : public std::enable_shared_from_this<HttpExchange> {
 public:
  HttpExchange(std::weak_ptr<EventLoop> loop, std::weak_ptr<HttpConnection> connection,
               HttpRequest request, bool keep_alive, bool chunked);
  ~HttpExchange();
  HttpExchange(const HttpExchange&) = delete;
  HttpExchange& operator=(const HttpExchange&) = delete;

  const HttpRequest& request() const { return request_; }

  // A header of whatever the answer will be. Not thread-safe: for the handler that sees the request
  // first.
  void add_header(std::string name, std::string value);
  // For code that names requests: engine/http/request_check.h.
  void set_request_id(std::string id) { request_id_ = std::move(id); }
  const std::string& request_id() const { return request_id_; }

  // The whole answer. The first of reply() and begin() counts, later ones do nothing.
  void reply(int status, std::string_view content_type, const std::string& body,
             const HttpHeaders& headers = {});
  // An answer that is written piece by piece; to HEAD only its head is sent.
  void begin(int status, std::string_view content_type, const HttpHeaders& headers = {});
  void write(std::string bytes);
  void end();
  bool begun() const { return begun_; }

  // The client has left, or was given up because it takes nothing any more: what is written goes
  // nowhere.
  bool gone() const { return gone_; }
  // Runs `task` on the loop's thread when the client leaves before the answer was handed to it
  // whole; at once if it has left. At most one; a later call replaces it.
  void on_gone(std::function<void()> task);

 private:
  friend class HttpConnection;
  std::string head(int status, std::string_view content_type, const HttpHeaders& headers) const;
  void send(std::string bytes, bool last, bool close);

  const std::weak_ptr<EventLoop> loop_;
  const std::weak_ptr<HttpConnection> connection_;
  HttpRequest request_;  // its body comes after the filter
  bool keep_alive_;
  const bool chunked_;
  HttpHeaders headers_;
  std::string request_id_;
  std::atomic<bool> begun_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> gone_{false};
};

using HttpHandler = std::function<void(const std::shared_ptr<HttpExchange>&)>;

struct HttpListenerOptions {
  size_t max_connections = 16384;  // less where the process may have fewer files open
  size_t max_head = size_t{32} << 10;
  size_t max_body = size_t{16} << 20;
  // A client that leaves more lying is given up. One piece may be longer: what is written behind it
  // is what counts.
  size_t max_unsent = size_t{8} << 20;
  std::chrono::milliseconds head_timeout =
      patient(std::chrono::milliseconds(10000));  // from the first look for a request to its head
  std::chrono::milliseconds body_timeout = patient(std::chrono::milliseconds(30000));
  std::chrono::milliseconds idle_timeout =
      patient(std::chrono::milliseconds(75000));  // between two requests of a connection
  std::chrono::milliseconds write_timeout =
      patient(std::chrono::milliseconds(60000));  // a client that takes nothing for so long
  // When there are too many connections, the server closes the one that has made it wait longest:
  // for a request, for the request's end, or for reading an answer, after it has read nothing for
  // this long.
  std::chrono::milliseconds unread_after = patient(std::chrono::milliseconds(5000));
  const Clock* clock = &Clock::steady();  // of `unread_after`; the deadlines are the loop's
  // PEM files, both or none: with them the listener speaks TLS alone (1.2 and newer).
  std::string tls_certificate;  // and those that lead to its root
  std::string tls_key;          // without a password
  // Origins whose pages may call this server from a browser, such as "https://chat.example"; "*":
  // all. Preflights of theirs (OPTIONS) are answered, before any key is asked for. None: no CORS.
  std::vector<std::string> allowed_origins;
};

struct HttpListenerStats {
  size_t connections = 0;
  size_t answering = 0;    // of these, with a request that is not answered yet
  uint64_t refused = 0;    // closed because there were too many
  uint64_t timed_out = 0;  // half-sent requests, clients that took nothing
};

// "HOST:PORT", with brackets around an IPv6 address.
std::string authority(std::string_view host, std::string_view port);

class HttpListener {
 public:
  explicit HttpListener(HttpListenerOptions options = {});
  // stop().
  ~HttpListener();

  // Handlers run on the loop's thread and must not block. Register them before listen(). A path
  // that ends with "/" stands for all below it that have no handler of their own. A path that has
  // none is answered with 404, and one with another method with 405.
  void route(const std::string& method, const std::string& path, HttpHandler handler);
  // Sees every request first, when its head is there and its body is not read yet; answers it at
  // once and says true, or leaves it to its handler.
  void set_filter(std::function<bool(const std::shared_ptr<HttpExchange>&)> filter);
  // Binds and starts serving; raises this process's limit of open files as far as it may.
  // Unavailable, with the remedy, if the port cannot be had; InvalidArgument if the TLS files are
  // not good.
  absl::Status listen(const std::string& host, int port);
  int port() const;
  // From here on a request is refused with 503, Retry-After and "Connection: close" before its
  // handler sees it, unless its path is one of these; connections end behind their answer. From any
  // thread.
  void drain(std::vector<std::string> still_answered);
  // Requests that wait for their answer or its end.
  size_t unanswered() const;
  // Closes all connections: their exchanges are gone. Then no handler runs any more.
  void stop();

  const std::shared_ptr<EventLoop>& loop() const { return loop_; }
  HttpListenerStats stats() const;

 private:
  struct Impl;
  const std::shared_ptr<EventLoop> loop_;
  const std::shared_ptr<Impl> impl_;
};

// Sends {"error": ...} in OpenAI's shape with the status that fits; also Retry-After, in seconds,
// where the status has this payload, and with every 429.
inline constexpr char kRetryAfterPayload[] = "retry_after";
void reply_error(const absl::Status& status, HttpExchange* exchange);

}  // namespace baton::engine::http
