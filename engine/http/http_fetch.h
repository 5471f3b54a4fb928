// An HTTP request to another server, on an event loop: no thread waits for the answer.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/http/event_loop.h"
#include "engine/http/http_listener.h"
#include "transport/clock.h"

namespace baton::engine::http {

// A server: "http://HOST:PORT" or "http://HOST", or the same with https.
struct HttpUrl {
  std::string host;
  std::string port = "80";  // "443" of https
  bool tls = false;

  // InvalidArgument showing how a URL looks.
  static absl::StatusOr<HttpUrl> parse(std::string_view text);
  // As it is parsed; the port is always said.
  std::string text() const;
  friend bool operator==(const HttpUrl&, const HttpUrl&) = default;
};

// Bytes that several requests send without copying them.
using SharedBytes = std::shared_ptr<const std::string>;

// The certificates that are trusted.
struct HttpTrust;
// Trusts the certificates in this PEM file and those that they signed; "": the system's, or those
// of SSL_CERT_FILE. InvalidArgument if the file cannot be used.
absl::StatusOr<std::shared_ptr<HttpTrust>> load_trust(const std::string& file);

struct HttpFetchRequest {
  HttpUrl url;
  std::string method = "GET";
  std::string path = "/";
  std::vector<SharedBytes> body;  // one behind the other
  HttpHeaders headers;
  std::shared_ptr<HttpTrust> trust;  // for https; null: as the system has it
  bool has_answered = false;         // this server, at this URL
  std::chrono::milliseconds connect_timeout = patient(std::chrono::milliseconds(5000));
  std::chrono::milliseconds timeout{0};  // of the whole exchange; 0: none
};

// A payload of the error with which a request ends of which no byte was sent: the server was not
// reached, and cannot have begun to work on it.
inline constexpr char kNotSentPayload[] = "not_sent";

// All run on the loop's thread; none after cancel() or on_end.
struct HttpFetchEvents {
  std::function<void(int status, std::string_view retry_after)> on_head;
  std::function<void(std::string_view bytes)> on_body;  // as they come, chunks undone
  // OK: the answer is whole. DeadlineExceeded, Unavailable: it is not, and why.
  std::function<void(const absl::Status&)> on_end;
};

// To be used on the loop's thread alone. Dropping the last pointer cancels.
class HttpFetch {
 public:
  static std::unique_ptr<HttpFetch> start(const std::shared_ptr<EventLoop>& loop,
                                          HttpFetchRequest request, HttpFetchEvents events);
  virtual ~HttpFetch() = default;
};

}  // namespace baton::engine::http
