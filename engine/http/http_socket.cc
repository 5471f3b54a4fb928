// Client sockets without TLS.
#include "engine/http/http_socket.h"

#include <array>
#include <utility>

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

}  // namespace baton::engine::http
