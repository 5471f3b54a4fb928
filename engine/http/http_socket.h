// A client's socket, plain or with TLS. Internal to engine/http; everything runs on the loop's
// thread, and a pending wait keeps the socket alive.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "absl/status/statusor.h"

namespace baton::engine::http {

class HttpSocket {
 public:
  using ErrorCode = boost::system::error_code;
  using Transferred = std::function<void(ErrorCode, size_t)>;

  virtual ~HttpSocket() = default;
  // Comes first: with TLS it agrees on keys.
  virtual void handshake(std::function<void(ErrorCode)> done) = 0;
  virtual void read_some(boost::asio::mutable_buffer into, Transferred done) = 0;
  virtual void write_some(boost::asio::const_buffer bytes, Transferred done) = 0;
  // Says that nothing follows, and throws away what the client still sends, until it ends too:
  // a socket closed over unread bytes is reset, and what was sent last may be lost.
  virtual void finish(std::function<void()> done) = 0;
  // The connection below, to be watched and closed.
  virtual boost::asio::ip::tcp::socket& tcp() = 0;
};

std::unique_ptr<HttpSocket> plain_socket(boost::asio::ip::tcp::socket socket);

// A server's certificate and key. Immutable.
class HttpTls {
 public:
  // PEM files: the certificate with those that lead to its root, and its private key without a
  // password. InvalidArgument says which file is wrong, and how. TLS 1.2 and newer.
  static absl::StatusOr<std::shared_ptr<const HttpTls>> load(const std::string& certificate,
                                                             const std::string& key);
  virtual ~HttpTls() = default;
  virtual std::unique_ptr<HttpSocket> wrap(boost::asio::ip::tcp::socket socket) const = 0;
};

}  // namespace baton::engine::http
