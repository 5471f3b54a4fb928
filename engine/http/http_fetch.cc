// Connecting, sending, and reading an answer piece by piece.
#include "engine/http/http_fetch.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/sslerr.h>
#include <openssl/x509_vfy.h>

#include <array>
#include <limits>
#include <optional>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace baton::engine::http {

struct HttpTrust {
  boost::asio::ssl::context context{boost::asio::ssl::context::tls_client};
};

absl::StatusOr<std::shared_ptr<HttpTrust>> load_trust(const std::string& file) {
  using boost::asio::ssl::context;
  auto trust = std::make_shared<HttpTrust>();
  boost::system::error_code error;
  trust->context.set_options(context::default_workarounds | context::no_tlsv1 | context::no_tlsv1_1,
                             error);
  trust->context.set_verify_mode(context::verify_peer, error);
  if (file.empty()) {
    trust->context.set_default_verify_paths(error);
  } else {
    trust->context.load_verify_file(file, error);
  }
  if (!error) return trust;
  return absl::InvalidArgumentError(
      absl::StrCat("the certificates in \"", file, "\" cannot be used (", error.message(),
                   "): it must be a PEM file of the CAs that sign the servers' certificates"));
}

namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using boost::system::error_code;

// For requests without their own. Null: the system's certificates cannot be read.
const std::shared_ptr<HttpTrust>& system_trust() {
  static const std::shared_ptr<HttpTrust> trust = load_trust("").value_or(nullptr);
  return trust;
}

bool is_end(const error_code& error) {
  return error == asio::error::eof || error == asio::error::connection_reset ||
         error == asio::error::broken_pipe || error == asio::ssl::error::stream_truncated ||
         error == beast::http::error::end_of_stream;
}

std::string why_no_tls(const SSL* ssl, const error_code& error) {
  const long found = SSL_get_verify_result(ssl);
  if (found != X509_V_OK) return X509_verify_cert_error_string(found);
  if (is_end(error)) return "it closed the connection during the handshake";
  // The first record was not a TLS record.
  if (error.category() == asio::error::get_ssl_category() &&
      ERR_GET_REASON(static_cast<unsigned long>(error.value())) == SSL_R_WRONG_VERSION_NUMBER) {
    return "server did not speak TLS; try an http:// URL";
  }
  return error.message();
}

class FetchExchange : public std::enable_shared_from_this<FetchExchange> {
 public:
  FetchExchange(const std::shared_ptr<EventLoop>& loop, HttpFetchRequest request,
                HttpFetchEvents events)
      : loop_(loop),
        request_(std::move(request)),
        events_(std::move(events)),
        resolver_(loop->context()),
        socket_(loop->context()) {}

  void start() {
    if (request_.timeout.count() > 0) {
      whole_ = loop_->after(request_.timeout, [this] { end_late(); });
    }
    connecting_ = loop_->after(request_.connect_timeout, [this] { end_late(); });
    resolver_.async_resolve(
        request_.url.host, request_.url.port,
        [self = shared_from_this()](error_code error, const tcp::resolver::results_type& found) {
          if (self->over_) return;
          if (error) return self->end(error);
          self->connect(found);
        });
  }

  void cancel() {
    over_ = true;
    // Not here: one of them may be what cancels.
    loop_->post([self = shared_from_this()] { self->events_ = {}; });
    connecting_.reset();
    whole_.reset();
    resolver_.cancel();
    error_code ignored;
    socket_.close(ignored);
  }

 private:
  // Calls `use` with the stream that bytes go through.
  template <typename Fn>
  void with_stream(Fn&& use) {
    tls_.has_value() ? use(*tls_) : use(socket_);
  }

  void connect(const tcp::resolver::results_type& found) {
    asio::async_connect(socket_, found,
                        [self = shared_from_this()](error_code error, const tcp::endpoint&) {
                          if (self->over_) return;
                          if (error) return self->end(error);
                          error_code ignored;
                          self->socket_.set_option(tcp::no_delay(true), ignored);
                          self->request_.url.tls ? self->shake_hands() : self->write();
                        });
  }

  // The certificate must be a trusted one, and for this host.
  void shake_hands() {
    const std::shared_ptr<HttpTrust>& trust = request_.trust ? request_.trust : system_trust();
    if (trust == nullptr) return end(absl::UnavailableError("the system trusts no certificates"));
    waits_for_ = "the TLS handshake was not over in time";
    SSL* const ssl = tls_.emplace(socket_, trust->context).native_handle();
    const std::string& host = request_.url.host;
    error_code is_name;
    asio::ip::make_address(host, is_name);
    const bool told = is_name
                          ? SSL_set1_host(ssl, host.c_str()) == 1 &&
                                SSL_set_tlsext_host_name(ssl, host.c_str()) == 1
                          : X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host.c_str()) == 1;
    if (!told) return end(absl::UnavailableError("no certificate can match such a host"));
    tls_->async_handshake(
        asio::ssl::stream_base::client, [self = shared_from_this()](error_code error) {
          if (self->over_) return;
          if (!error) return self->write();
          self->end(absl::UnavailableError(
              absl::StrCat("TLS failed: ", why_no_tls(self->tls_->native_handle(), error))));
        });
  }

  void write() {
    connecting_.reset();
    waits_for_ = "no answer in time";
    size_t length = 0;
    for (const SharedBytes& part : request_.body) length += part->size();
    head_ = absl::StrCat(request_.method, " ", request_.path,
                         " HTTP/1.1\r\nHost: ", authority(request_.url.host, request_.url.port),
                         "\r\nConnection: close\r\n", "Content-Length: ", length, "\r\n");
    for (const auto& [name, value] : request_.headers) {
      absl::StrAppend(&head_, name, ": ", value, "\r\n");
    }
    absl::StrAppend(&head_, "\r\n");
    std::vector<asio::const_buffer> pieces = {asio::buffer(head_)};
    for (const SharedBytes& part : request_.body) pieces.push_back(asio::buffer(*part));
    with_stream([&](auto& stream) {
      asio::async_write(stream, pieces, [self = shared_from_this()](error_code error, size_t) {
        self->request_.body.clear();
        if (self->over_) return;
        // A server may answer before it has read everything.
        if (error && error != asio::error::broken_pipe && error != asio::error::connection_reset) {
          return self->end(error);
        }
        self->read_head();
      });
    });
  }

  void read_head() {
    parser_.body_limit(std::numeric_limits<uint64_t>::max());
    with_stream([&](auto& stream) {
      beast::http::async_read_header(
          stream, buffer_, parser_, [self = shared_from_this()](error_code error, size_t) {
            if (self->over_) return;
            if (error) return self->end(self->why_no_answer(error));
            const auto& head = self->parser_.get();
            const auto retry = head[beast::http::field::retry_after];
            self->events_.on_head(static_cast<int>(head.result_int()),
                                  std::string_view(retry.data(), retry.size()));
            if (!self->over_) self->read_body();
          });
    });
  }

  absl::Status why_no_answer(const error_code& error) const {
    const auto said = buffer_.data();
    const auto* const bytes = static_cast<const unsigned char*>(said.data());
    const bool is_alert = said.size() >= 2 && bytes[0] == 0x15 && bytes[1] == 0x03;
    if (!tls_.has_value() && is_alert) {
      return absl::UnavailableError("server spoke TLS; try an https:// URL");
    }
    if (!is_end(error) || said.size() > 0) return absl::UnavailableError(error.message());
    return absl::UnavailableError(
        absl::StrCat("it closed the connection without an answer",
                     tls_.has_value() || request_.has_answered
                         ? ""
                         : ", as a server that speaks TLS does; try an https:// URL"));
  }

  void read_body() {
    if (parser_.is_done()) return end(absl::OkStatus());
    parser_.get().body().data = piece_.data();
    parser_.get().body().size = piece_.size();
    parser_.get().body().more = true;
    with_stream([&](auto& stream) {
      beast::http::async_read_some(
          stream, buffer_, parser_, [self = shared_from_this()](error_code error, size_t) {
            if (self->over_) return;
            const size_t unused = self->parser_.get().body().size;
            const size_t count = self->piece_.size() - unused;
            if (count > 0) self->events_.on_body(std::string_view(self->piece_.data(), count));
            if (self->over_) return;
            if (error && error != beast::http::error::need_buffer) return self->end(error);
            self->read_body();
          });
    });
  }

  void end(const error_code& error) { end(absl::UnavailableError(error.message())); }
  void end_late() { end(absl::DeadlineExceededError(waits_for_)); }
  // OK: everything is here.
  void end(absl::Status status) {
    if (over_) return;
    if (!status.ok() && head_.empty()) status.SetPayload(kNotSentPayload, absl::Cord());
    const std::shared_ptr<FetchExchange> self = shared_from_this();
    const HttpFetchEvents events = std::move(events_);
    cancel();
    events.on_end(status);
  }

  const std::shared_ptr<EventLoop> loop_;
  HttpFetchRequest request_;
  HttpFetchEvents events_;
  tcp::resolver resolver_;
  tcp::socket socket_;
  std::optional<asio::ssl::stream<tcp::socket&>> tls_;  // over the socket
  std::unique_ptr<EventLoop::Timer> connecting_, whole_;
  std::string head_;
  beast::flat_buffer buffer_;
  beast::http::response_parser<beast::http::buffer_body> parser_;
  std::array<char, size_t{16} << 10> piece_;
  const char* waits_for_ = "connecting timed out";  // said where it comes too late
  bool over_ = false;
};

class Fetch : public HttpFetch {
 public:
  explicit Fetch(std::shared_ptr<FetchExchange> exchange) : exchange_(std::move(exchange)) {}
  ~Fetch() override { exchange_->cancel(); }

 private:
  const std::shared_ptr<FetchExchange> exchange_;
};

}  // namespace

absl::StatusOr<HttpUrl> HttpUrl::parse(std::string_view text) {
  constexpr std::string_view kPlain = "http://", kTls = "https://";
  const auto bad = [&] {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", std::string(text), "\" is not a URL such as http://127.0.0.1:8001, or with https"));
  };
  HttpUrl url;
  url.tls = text.starts_with(kTls);
  if (!url.tls && !text.starts_with(kPlain)) return bad();
  if (url.tls) url.port = "443";
  std::string_view rest = text.substr((url.tls ? kTls : kPlain).size());
  if (rest.ends_with('/')) rest.remove_suffix(1);
  const size_t bracket = rest.starts_with('[') ? rest.find(']') : 0;
  if (bracket == std::string_view::npos) return bad();
  const size_t colon = rest.find(':', bracket);
  url.host = rest.substr(0, colon);
  if (bracket > 0) url.host = rest.substr(1, bracket - 1);
  if (colon != std::string_view::npos) url.port = rest.substr(colon + 1);
  int port = 0;
  if (url.host.empty() || url.host.find_first_of("/?# ") != std::string::npos ||
      !absl::SimpleAtoi(url.port, &port) || port < 1 || port > 65535) {
    return bad();
  }
  return url;
}

std::string HttpUrl::text() const {
  return absl::StrCat(tls ? "https://" : "http://", authority(host, port));
}

std::unique_ptr<HttpFetch> HttpFetch::start(const std::shared_ptr<EventLoop>& loop,
                                            HttpFetchRequest request, HttpFetchEvents events) {
  auto exchange = std::make_shared<FetchExchange>(loop, std::move(request), std::move(events));
  exchange->start();
  return std::make_unique<Fetch>(std::move(exchange));
}

}  // namespace baton::engine::http
