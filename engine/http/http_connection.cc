// A connection's states: head, body, answer, and the next request.
#include "engine/http/http_connection.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <string_view>
#include <utility>

#include <boost/asio/buffer.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/files/utf8.h"
#include "engine/http/openai/openai_reply.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;

constexpr std::chrono::milliseconds kWatchEvery{250};
constexpr std::chrono::milliseconds kLinger{2000};

constexpr size_t kReadAtOnce = size_t{16} << 10;
constexpr std::chrono::milliseconds kEchoOfProbe{10};
constexpr char kContinue[] = "HTTP/1.1 100 Continue\r\n\r\n";

// RFC 9112, 5.2: obs-fold. A proxy in front may read another line there.
bool has_folded_line(std::string_view head) {
  return head.find("\r\n ") != std::string_view::npos ||
         head.find("\r\n\t") != std::string_view::npos;
}

// RFC 9112, 3.2: a client may name the whole URL, as it does to a proxy.
std::string path_of(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!absl::EqualsIgnoreCase(view(target.substr(0, scheme.size())), view(scheme))) continue;
    const size_t path = target.find_first_of("/?", scheme.size());
    target = path == std::string_view::npos ? std::string_view() : target.substr(path);
    if (!target.starts_with('/')) return "/";
    break;
  }
  return std::string(target.substr(0, target.find('?')));
}

std::string text(beast::string_view view) { return {view.data(), view.size()}; }

}  // namespace

HttpConnection::HttpConnection(std::unique_ptr<HttpSocket> socket,
                               std::shared_ptr<ConnectionHost> host)
    : socket_(std::move(socket)), host_(std::move(host)) {}

void HttpConnection::start() {
  self_ = host_->all.insert(host_->all.end(), shared_from_this());
  ++host_->connections;
  ErrorCode ignored;
  socket_->tcp().set_option(asio::ip::tcp::no_delay(true), ignored);
  begin_reading(host_->options.head_timeout);
  socket_->handshake([self = shared_from_this()](ErrorCode error) {
    if (self->closed_) return;
    if (error) return self->close();
    self->read_request();
  });
}

void HttpConnection::close() {
  if (closed_) return;
  closed_ = true;
  const std::shared_ptr<HttpConnection> self = shared_from_this();  // until this returns
  stop_reading();
  stop_writing();
  host_->all.erase(self_);
  --host_->connections;
  end_answering();
  deadline_.reset();
  watch_timer_.reset();
  ErrorCode ignored;
  socket_->tcp().close(ignored);
  if (const auto exchange = exchange_.lock(); exchange != nullptr) exchange->gone_ = true;
  incoming_.reset();
  if (const auto task = std::exchange(on_gone_, nullptr)) task();
}

void HttpConnection::end_answering() {
  if (std::exchange(answering_, false)) --host_->answering;
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
  base::promise_memory(-std::exchange(promised_, 0));
}

// What is being written has its own deadline then.
void HttpConnection::end_reading() {
  stop_reading();
  deadline_.reset();
  if (!is_writing_) return;
  set_deadline(host_->options.write_timeout);
  begin_writing();
}

void HttpConnection::begin_reading(std::chrono::milliseconds timeout) {
  reading_ = host_->reading.insert(host_->reading.end(), this);
  is_reading_ = true;
  waits_since_ = host_->options.clock->now();
  set_deadline(timeout);
}

void HttpConnection::begin_writing() {
  if (is_reading_ || is_in_writing_) return;  // as one that reads it may be closed anyway
  writing_in_ = host_->writing.insert(host_->writing.end(), this);
  is_in_writing_ = true;
  waits_since_ = host_->options.clock->now();
  not_taken_ = not_taken();
}

void HttpConnection::stop_writing() {
  if (std::exchange(is_in_writing_, false)) host_->writing.erase(writing_in_);
}

// The bytes that the client's side has not acknowledged. The number falls while the client reads,
// long before there is room for more.
int HttpConnection::not_taken() const {
  int bytes = 0;
  return ioctl(socket_->tcp().native_handle(), SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

bool HttpConnection::moves() {
  if (not_taken() == not_taken_) return false;
  stop_writing();
  begin_writing();
  return true;
}

void HttpConnection::read_request() {
  exchange_.reset();
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(host_->options.max_head));
  parser_->body_limit(host_->options.max_body);
  searched_ = 0;
  read_head();
}

// RFC 9112, 2.2: some clients send an empty line behind a body.
void HttpConnection::skip_empty_lines() {
  const auto bytes = buffer_.data();
  const std::string_view seen(static_cast<const char*>(bytes.data()), bytes.size());
  size_t end = 0;
  while (seen.substr(end, 2) == "\r\n") end += 2;
  buffer_.consume(end);
  if (end > 0) searched_ = 0;
}

void HttpConnection::read_more(void (HttpConnection::*then)()) {
  socket_->read_some(buffer_.prepare(kReadAtOnce),
                     [self = shared_from_this(), then](ErrorCode error, size_t count) {
                       if (self->closed_) return;
                       if (error) return self->close();  // the client, or the socket, has gone
                       self->buffer_.commit(count);
                       ((*self).*then)();
                     });
}

// Parsed when it is here whole: the parser does not tell of folded lines.
void HttpConnection::read_head() {
  skip_empty_lines();
  const auto bytes = buffer_.data();
  const std::string_view seen(static_cast<const char*>(bytes.data()), bytes.size());
  const size_t end = seen.find("\r\n\r\n", searched_ < 3 ? 0 : searched_ - 3);
  if ((end == std::string_view::npos ? seen.size() : end + 4) > host_->options.max_head) {
    return refuse(431, "the request's head is too long");
  }
  // A handshake, of which no end would come.
  if (seen.starts_with('\x16')) return refuse(400, "this server does not speak TLS");
  if (end == std::string_view::npos) {
    searched_ = seen.size();
    return read_more(&HttpConnection::read_head);
  }
  if (has_folded_line(seen.substr(0, end))) {
    return refuse(400, "a header must not continue on the next line: write it on one line");
  }
  parser_->eager(false);
  ErrorCode error;
  buffer_.consume(parser_->put(bytes, error));
  if (error) return malformed(error);
  begin_body();
}

void HttpConnection::malformed(ErrorCode error) {
  if (error == beast::http::error::header_limit || error == beast::http::error::buffer_overflow) {
    refuse(431, "the request's head is too long");
  } else if (error == beast::http::error::body_limit) {
    refuse(413, "the request's body is too long");
  } else {
    refuse(400, "this is not an HTTP/1.1 request");
  }
}

void HttpConnection::begin_body() {
  // RFC 9112, 3.2: with no Host or two, servers on the way may disagree about the target.
  const size_t hosts = parser_->get().count(beast::http::field::host);
  if (hosts > 1 || (hosts == 0 && parser_->get().version() >= 11)) {
    return refuse(400, "a request needs one Host header");
  }
  // In any other coding the body's end is not known, and what follows may be no request.
  const auto coding = parser_->get()[beast::http::field::transfer_encoding];
  if (!coding.empty() && !beast::iequals(coding, "chunked")) {
    return refuse(501, "the only supported Transfer-Encoding is chunked");
  }
  begin_exchange();
  // A client that may not ask must not send a body: the connection ends behind the answer.
  const bool keep_alive =
      std::exchange(incoming_->keep_alive_, incoming_->keep_alive_ && parser_->is_done());
  if (host_->filter(incoming_) || refuse_coding() || refuse_size()) {
    end_reading();
    return incoming_.reset();
  }
  incoming_->keep_alive_ = keep_alive;
  if (beast::iequals(parser_->get()[beast::http::field::expect], "100-continue")) {
    send(kContinue, false, false);
  }
  set_deadline(host_->options.body_timeout);
  parser_->eager(true);
  read_body();
}

// A body that would have to be unpacked first is not read; true: it is refused.
bool HttpConnection::refuse_coding() {
  const std::string_view coding = incoming_->request().header("content-encoding");
  if (parser_->is_done() || coding.empty() || absl::EqualsIgnoreCase(view(coding), "identity")) {
    return false;
  }
  incoming_->reply(
      415, "application/json",
      api_error(415, absl::StrCat("a body in Content-Encoding ", view(coding.substr(0, 64)),
                                  " is not supported: send it unencoded")),
      {{"Accept-Encoding", "identity"}});
  return true;
}

// Nor is one for which there is no memory: it is kept, parsed and copied. Others that are being
// read count as if they were here.
bool HttpConnection::refuse_size() {
  constexpr size_t kMany = 1 << 20, kCopies = 3;
  const auto told = parser_->content_length();
  const size_t size = parser_->is_done() ? 0 : told.value_or(host_->options.max_body);
  if (size < kMany) return false;
  const absl::Status fits = base::memory_fits("reading a request: memory", kCopies * size);
  if (!fits.ok()) {
    incoming_->reply(503, "application/json", api_error(503, std::string(fits.message())));
    return true;
  }
  promised_ = static_cast<int64_t>(kCopies * size);
  base::promise_memory(promised_);
  return false;
}

void HttpConnection::read_body() {
  while (!parser_->is_done() && buffer_.size() > 0) {
    ErrorCode error;
    const size_t used = parser_->put(buffer_.data(), error);
    buffer_.consume(used);
    if (error == beast::http::error::need_more || (!error && used == 0)) break;
    if (error) return malformed(error);
  }
  if (parser_->is_done()) return requested();
  read_more(&HttpConnection::read_body);
}

void HttpConnection::begin_exchange() {
  const auto& message = parser_->get();
  HttpRequest request;
  request.method = text(message.method_string());
  request.path = path_of(text(message.target()));
  for (const auto& field : message) {
    request.headers[absl::AsciiStrToLower(text(field.name_string()))] = text(field.value());
  }
  incoming_ = std::make_shared<HttpExchange>(host_->loop, weak_from_this(), std::move(request),
                                             parser_->keep_alive() && !host_->draining,
                                             message.version() >= 11);
  exchange_ = incoming_;
}

void HttpConnection::requested() {
  end_reading();
  answering_ = true;
  ++host_->answering;
  last_ = false;
  const std::shared_ptr<HttpExchange> exchange = std::exchange(incoming_, nullptr);
  exchange->request_.body = std::move(parser_->get().body());
  watch();
  host_->handle(exchange);
}

void HttpConnection::refuse(int status, const char* message) {
  end_reading();
  const std::string body = api_error(status, message);
  // The end of the request is not known, so no other request can follow it.
  send(absl::StrCat("HTTP/1.1 ", status, " Refused\r\nContent-Type: application/json\r\n",
                    "Content-Length: ", body.size(), "\r\nConnection: close\r\n\r\n", body),
       true, true);
  if (incoming_ == nullptr) return;
  incoming_->gone_ = true;
  incoming_.reset();
}

// While the answer is made, the only thing that a client can do is to leave.
void HttpConnection::watch() {
  looks_ = 0;
  socket_->tcp().async_wait(
      asio::ip::tcp::socket::wait_read, [self = shared_from_this()](ErrorCode error) {
        if (self->closed_ || !self->answering_ || error == asio::error::operation_aborted) return;
        self->watch_again();
      });
}

void HttpConnection::watch_again() {
  pollfd entry{socket_->tcp().native_handle(), POLLRDHUP, 0};
  poll(&entry, 1, 0);
  if ((entry.revents & (POLLHUP | POLLERR)) != 0) return close();
  auto next = kWatchEvery;
  if ((entry.revents & POLLRDHUP) != 0) {
    if (parser_->get().version() < 11) return close();  // it may not be sent what it did not ask
    if (probe()) next = kEchoOfProbe;
  }
  // It sent its next request already: that is left in the socket, so asking for readability would
  // return at once for ever.
  const auto loop = host_->loop.lock();
  if (loop == nullptr) return;
  watch_timer_ = loop->after(next, [self = weak_from_this()] {
    if (const auto connection = self.lock(); connection != nullptr) connection->watch_again();
  });
}

// A client that sends no more may have left, or wait for its answer: only sending to it tells,
// since a client that left answers with a reset. Before the answer begins the server sends an empty
// interim head; some clients accept only a few.
bool HttpConnection::probe() {
  const int look = looks_++;
  const auto exchange = exchange_.lock();
  if (exchange == nullptr || exchange->begun() || is_writing_) return false;
  if (look != 0 && look != 4 && look != 20) return false;
  send(kContinue, false, false);
  return true;
}

void HttpConnection::send(std::string bytes, bool last, bool close_behind) {
  if (closed_ || last_) return;
  unsent_bytes_ += bytes.size();
  // A client cannot read half an event away, however quick it is: one may be as long as it is.
  if (bytes.size() > host_->options.max_unsent && long_piece_ == 0) long_piece_ = bytes.size();
  unsent_.push_back(std::move(bytes));
  last_ = last;
  close_when_sent_ = close_behind;
  if (unsent_bytes_ > host_->options.max_unsent + long_piece_ && !last) {
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
  writes_long_ = long_piece_ != 0;
  is_writing_ = true;
  write_some();
}

void HttpConnection::write_some() {
  if (!is_reading_) set_deadline(host_->options.write_timeout);
  socket_->write_some(asio::const_buffer(asio::buffer(writing_)) + written_bytes_,
                      [self = shared_from_this()](ErrorCode error, size_t count) {
                        self->written_bytes_ += count;
                        self->unsent_bytes_ -= count;
                        self->written(error);
                      });
  begin_writing();
}

void HttpConnection::written(ErrorCode error) {
  if (closed_) return;
  stop_writing();
  if (error) return close();
  if (written_bytes_ < writing_.size()) return write_some();
  is_writing_ = false;
  if (std::exchange(writes_long_, false)) long_piece_ = 0;
  if (!is_reading_) deadline_.reset();
  if (!unsent_.empty()) return write_next();
  if (!last_) return;
  last_ = false;
  end_answering();
  watch_timer_.reset();
  on_gone_ = nullptr;
  exchange_.reset();
  if (close_when_sent_) return finish();
  ErrorCode ignored;
  socket_->tcp().cancel(ignored);  // the watch
  begin_reading(host_->options.idle_timeout);
  read_request();
}

// The client may still be sending what was refused.
void HttpConnection::finish() {
  begin_reading(kLinger);
  socket_->finish([self = shared_from_this()] { self->close(); });
}

}  // namespace baton::engine::http
