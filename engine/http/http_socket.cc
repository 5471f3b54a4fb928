// Client sockets, with TLS and without.
#include "engine/http/http_socket.h"

#include <array>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::engine::http {
namespace {

namespace asio = boost::asio;

class PlainSocket : public HttpSocket {
 public:
  explicit PlainSocket(asio::ip::tcp::socket socket) : socket_(std::move(socket)) {}

  void handshake(std::function<void(ErrorCode)> done) override { done({}); }
  void read_some(asio::mutable_buffer into, Transferred done) override {
    socket_.async_read_some(into, std::move(done));
  }
  void write_some(asio::const_buffer bytes, Transferred done) override {
    socket_.async_write_some(bytes, std::move(done));
  }
  void finish(std::function<void()> done) override {
    ErrorCode ignored;
    socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    throw_away(std::move(done));
  }
  asio::ip::tcp::socket& tcp() override { return socket_; }

 private:
  void throw_away(std::function<void()> done) {
    socket_.async_read_some(asio::buffer(thrown_away_),
                            [this, done = std::move(done)](ErrorCode error, size_t) mutable {
                              // A socket that is closed has no owner, perhaps.
                              if (error) return done();
                              throw_away(std::move(done));
                            });
  }

  asio::ip::tcp::socket socket_;
  std::array<char, size_t{4} << 10> thrown_away_;
};

}  // namespace

std::unique_ptr<HttpSocket> plain_socket(asio::ip::tcp::socket socket) {
  return std::make_unique<PlainSocket>(std::move(socket));
}

namespace {

namespace asio = boost::asio;

class TlsSocket : public HttpSocket {
 public:
  TlsSocket(asio::ip::tcp::socket socket, std::shared_ptr<asio::ssl::context> context)
      : context_(std::move(context)), stream_(std::move(socket), *context_) {}

  void handshake(std::function<void(ErrorCode)> done) override {
    stream_.async_handshake(asio::ssl::stream_base::server, std::move(done));
  }
  void read_some(asio::mutable_buffer into, Transferred done) override {
    stream_.async_read_some(into, std::move(done));
  }
  void write_some(asio::const_buffer bytes, Transferred done) override {
    stream_.async_write_some(bytes, std::move(done));
  }
  void finish(std::function<void()> done) override {
    stream_.async_shutdown([done = std::move(done)](ErrorCode) { done(); });
  }
  asio::ip::tcp::socket& tcp() override { return stream_.next_layer(); }

 private:
  const std::shared_ptr<asio::ssl::context> context_;
  asio::ssl::stream<asio::ip::tcp::socket> stream_;
};

class OpensslTls : public HttpTls {
 public:
  explicit OpensslTls(std::shared_ptr<asio::ssl::context> context) : context_(std::move(context)) {}
  std::unique_ptr<HttpSocket> wrap(asio::ip::tcp::socket socket) const override {
    return std::make_unique<TlsSocket>(std::move(socket), context_);
  }

 private:
  const std::shared_ptr<asio::ssl::context> context_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const HttpTls>> HttpTls::load(const std::string& certificate,
                                                             const std::string& key) {
  using asio::ssl::context;
  boost::system::error_code error;
  const auto failed = [&](const char* what, const std::string& file) {
    return absl::InvalidArgumentError(absl::StrCat("the TLS ", what, " in \"", file,
                                                   "\" cannot be used (", error.message(),
                                                   "): it must be a PEM file, the certificate with "
                                                   "its chain, and its key without a password"));
  };
  auto made = std::make_shared<context>(context::tls_server);
  made->set_options(context::default_workarounds | context::no_tlsv1 | context::no_tlsv1_1, error);
  // Else OpenSSL would ask at the terminal.
  made->set_password_callback([](size_t, context::password_purpose) { return std::string(); },
                              error);
  made->use_certificate_chain_file(certificate, error);
  if (error) return failed("certificate", certificate);
  made->use_private_key_file(key, context::pem, error);
  if (error) return failed("key", key);  // another certificate's, too
  return std::make_shared<OpensslTls>(std::move(made));
}

}  // namespace baton::engine::http
