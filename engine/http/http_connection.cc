// A connection's states: head, body, answer, and the next request.
#include "engine/http/http_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/read.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "engine/http/openai_reply.h"

namespace baton::engine::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;

constexpr std::chrono::milliseconds kWatchEvery{250};
constexpr std::chrono::milliseconds kLinger{2000};

std::string text(beast::string_view view) { return {view.data(), view.size()}; }

}  // namespace

HttpConnection::HttpConnection(asio::ip::tcp::socket socket, std::shared_ptr<ConnectionHost> host)
    : socket_(std::move(socket)), host_(std::move(host)) {}

void HttpConnection::start() {
  self_ = host_->all.insert(host_->all.end(), shared_from_this());
  ++host_->connections;
  ErrorCode ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  read_request(host_->options.head_timeout);
}

void HttpConnection::close() {
  if (closed_) return;
  closed_ = true;
  const std::shared_ptr<HttpConnection> self = shared_from_this();  // until this returns
  stop_reading();
  host_->all.erase(self_);
  --host_->connections;
  if (std::exchange(answering_, false)) --host_->answering;
  deadline_.reset();
  watch_timer_.reset();
  ErrorCode ignored;
  socket_.close(ignored);
  if (const auto exchange = exchange_.lock(); exchange != nullptr) exchange->gone_ = true;
  if (const auto task = std::exchange(on_gone_, nullptr)) task();
}

void HttpConnection::on_gone(std::function<void()> task) {
  if (closed_) return task();
  if (answering_) on_gone_ = std::move(task);
}

void HttpConnection::set_deadline(std::chrono::milliseconds timeout) {
  const auto loop = host_->loop.lock();
  if (loop == nullptr) return;
  deadline_ = loop->after(timeout, [self = weak_from_this()] {
    const auto connection = self.lock();
    if (connection == nullptr) return;
    ++connection->host_->timed_out;
    connection->close();
  });
}

void HttpConnection::stop_reading() {
  if (std::exchange(is_reading_, false)) host_->reading.erase(reading_);
}

void HttpConnection::read_request(std::chrono::milliseconds timeout) {
  exchange_.reset();
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(host_->options.max_head));
  parser_->body_limit(host_->options.max_body);
  reading_ = host_->reading.insert(host_->reading.end(), this);
  is_reading_ = true;
  set_deadline(timeout);
  beast::http::async_read_header(
      socket_, buffer_, *parser_, [self = shared_from_this()](ErrorCode error, size_t) {
        if (self->closed_) return;
        if (!error) return self->read_body();
        if (error == beast::http::error::header_limit ||
            error == beast::http::error::buffer_overflow) {
          self->refuse(431, "the request's head is too long");
        } else if (error == beast::http::error::body_limit) {
          self->refuse(413, "the request's body is too long");
        } else if (error.category() == make_error_code(beast::http::error{}).category() &&
                   error != beast::http::error::end_of_stream) {
          self->refuse(400, "this is not an HTTP/1.1 request");
        } else {  // the client, or the socket, has gone
          self->close();
        }
      });
}

void HttpConnection::read_body() {
  // In any other coding the body's end is not known, and what follows may be no request.
  const auto coding = parser_->get()[beast::http::field::transfer_encoding];
  if (!coding.empty() && !beast::iequals(coding, "chunked")) {
    return refuse(501, "the only Transfer-Encoding that is understood is chunked");
  }
  if (beast::iequals(parser_->get()[beast::http::field::expect], "100-continue")) {
    send("HTTP/1.1 100 Continue\r\n\r\n", false, false);
  }
  set_deadline(host_->options.body_timeout);
  beast::http::async_read(socket_, buffer_, *parser_,
                          [self = shared_from_this()](ErrorCode error, size_t) {
                            if (self->closed_) return;
                            if (error == beast::http::error::body_limit) {
                              self->refuse(413, "the request's body is too long");
                            } else if (error) {
                              self->close();
                            } else {
                              self->requested();
                            }
                          });
}

void HttpConnection::requested() {
  stop_reading();
  deadline_.reset();
  answering_ = true;
  ++host_->answering;
  last_ = false;
  const bool keep_alive = parser_->keep_alive();
  const bool chunked = parser_->get().version() >= 11;
  auto& message = parser_->get();
  HttpRequest request;
  request.method = text(message.method_string());
  const std::string target = text(message.target());
  request.path = target.substr(0, target.find('?'));
  request.body = std::move(message.body());
  for (const auto& field : message) {
    request.headers[absl::AsciiStrToLower(text(field.name_string()))] = text(field.value());
  }
  auto exchange = std::make_shared<HttpExchange>(host_->loop, weak_from_this(), std::move(request),
                                                 keep_alive, chunked);
  exchange_ = exchange;
  watch();
  host_->handle(exchange);
}

void HttpConnection::refuse(int status, const char* message) {
  stop_reading();
  const std::string body = api_error(status, message);
  // Where the request ends is not known, so no other can follow it.
  send(absl::StrCat("HTTP/1.1 ", status, " Refused\r\nContent-Type: application/json\r\n",
                    "Content-Length: ", body.size(), "\r\nConnection: close\r\n\r\n", body),
       true, true);
}

// While the answer is made, the only thing that a client can do is to leave.
void HttpConnection::watch() {
  socket_.async_wait(
      asio::ip::tcp::socket::wait_read, [self = shared_from_this()](ErrorCode error) {
        if (self->closed_ || !self->answering_ || error == asio::error::operation_aborted) return;
        self->watch_again();
      });
}

void HttpConnection::watch_again() {
  pollfd entry{socket_.native_handle(), POLLRDHUP, 0};
  poll(&entry, 1, 0);
  if ((entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) return close();
  // It sent its next request already: that is left in the socket, so asking for readability would
  // return at once for ever.
  const auto loop = host_->loop.lock();
  if (loop == nullptr) return;
  watch_timer_ = loop->after(kWatchEvery, [self = weak_from_this()] {
    if (const auto connection = self.lock(); connection != nullptr) connection->watch_again();
  });
}

void HttpConnection::send(std::string bytes, bool last, bool close_behind) {
  if (closed_ || last_) return;
  unsent_bytes_ += bytes.size();
  unsent_.push_back(std::move(bytes));
  last_ = last;
  close_when_sent_ = close_behind;
  if (unsent_bytes_ > host_->options.max_unsent && !last) {
    ++host_->timed_out;
    return close();
  }
  if (!is_writing_) write_next();
}

void HttpConnection::write_next() {
  writing_.clear();
  written_bytes_ = 0;
  while (!unsent_.empty()) {
    writing_ += unsent_.front();
    unsent_.pop_front();
  }
  is_writing_ = true;
  write_some();
}

void HttpConnection::write_some() {
  if (!is_reading_) set_deadline(host_->options.write_timeout);
  socket_.async_write_some(asio::buffer(writing_) + written_bytes_,
                           [self = shared_from_this()](ErrorCode error, size_t count) {
                             self->written_bytes_ += count;
                             self->unsent_bytes_ -= count;
                             self->written(error);
                           });
}

void HttpConnection::written(ErrorCode error) {
  if (closed_) return;
  if (error) return close();
  if (written_bytes_ < writing_.size()) return write_some();
  is_writing_ = false;
  if (!is_reading_) deadline_.reset();
  if (!unsent_.empty()) return write_next();
  if (!last_) return;
  last_ = false;
  if (std::exchange(answering_, false)) --host_->answering;
  watch_timer_.reset();
  on_gone_ = nullptr;
  exchange_.reset();
  ErrorCode ignored;
  if (close_when_sent_) {
    socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    return linger();
  }
  socket_.cancel(ignored);  // the watch
  read_request(host_->options.idle_timeout);
}

// The client may still be sending what was refused. A socket closed over unread bytes is reset, and
// then the answer may be lost: what comes is thrown away for a while.
void HttpConnection::linger() {
  if (deadline_ == nullptr) set_deadline(kLinger);
  buffer_.clear();
  socket_.async_read_some(buffer_.prepare(size_t{16} << 10),
                          [self = shared_from_this()](ErrorCode error, size_t) {
                            if (self->closed_) return;
                            if (error) return self->close();
                            self->linger();
                          });
}

}  // namespace baton::engine::http
