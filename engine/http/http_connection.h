// One client's connection: reads a request, waits for its answer, watches whether the client is
// still there. Internal to engine/http; everything runs on the loop's thread.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "engine/http/http_listener.h"
#include "engine/http/http_socket.h"
#include "transport/clock.h"

namespace baton::engine::http {

// The state that all connections of a listener share; it outlives their callbacks.
struct ConnectionHost {
  HttpListenerOptions options;
  std::function<bool(const std::shared_ptr<HttpExchange>&)> filter;  // a head; true: answered
  HttpHandler handle;                                                // a whole request
  std::weak_ptr<EventLoop> loop;
  std::list<std::shared_ptr<HttpConnection>> all;
  // Connections that wait for a client's bytes or for its end; the longest wait comes first.
  std::list<HttpConnection*> reading;
  // Connections whose client must read an answer; the one that has read nothing for longest comes
  // first.
  std::list<HttpConnection*> writing;
  std::atomic<size_t> connections{0};
  std::atomic<size_t> answering{0};
  std::atomic<bool> draining{false};  // connections end behind their answer
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> timed_out{0};
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(std::unique_ptr<HttpSocket> socket, std::shared_ptr<ConnectionHost> host);

  // Reads the first request. The host's list keeps the connection until it is closed.
  void start();
  // Bytes of the answer; `last` ends it, and `close` the connection behind it.
  void send(std::string bytes, bool last, bool close);
  // Closes at once; an open exchange is told that the client is gone.
  void close();
  // Since when the client keeps us waiting, of those in one of the host's two lists.
  Time waits_since() const { return waits_since_; }
  // For connections in the host's list `writing`: whether the client has read bytes since it was
  // put there, or since the last call. If so, moves it to the list's end.
  bool moves();
  // Runs `task` when the connection is closed before the answer is sent; see HttpExchange.
  void on_gone(std::function<void()> task);

 private:
  using ErrorCode = boost::system::error_code;
  void begin_reading(std::chrono::milliseconds timeout);
  void read_request();
  void read_head();
  void skip_empty_lines();
  void begin_body();
  void begin_exchange();
  void read_body();
  void read_more(void (HttpConnection::*then)());
  void malformed(ErrorCode error);
  void requested();
  void refuse(int status, const char* message);
  void watch();
  void watch_again();
  bool probe();
  void write_next();
  void write_some();
  void finish();
  void written(ErrorCode error);
  void set_deadline(std::chrono::milliseconds timeout);
  void stop_reading();
  void end_reading();
  void begin_writing();
  void stop_writing();
  int not_taken() const;
  void end_answering();
  bool refuse_coding();
  bool refuse_size();
  int64_t promised_ = 0;  // bytes for the body that is being read

  const std::unique_ptr<HttpSocket> socket_;
  const std::shared_ptr<ConnectionHost> host_;
  std::list<std::shared_ptr<HttpConnection>>::iterator self_;
  std::list<HttpConnection*>::iterator reading_;
  bool is_reading_ = false;  // is in the host's list
  std::list<HttpConnection*>::iterator writing_in_;
  bool is_in_writing_ = false;
  Time waits_since_{};
  int not_taken_ = 0;  // bytes in the kernel, at that time
  bool closed_ = false;
  std::unique_ptr<EventLoop::Timer> deadline_;
  std::unique_ptr<EventLoop::Timer> watch_timer_;
  boost::beast::flat_buffer buffer_;
  size_t searched_ = 0;  // bytes of buffer_ in which no head ends
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::shared_ptr<HttpExchange> incoming_;  // until its body is here
  std::weak_ptr<HttpExchange> exchange_;
  bool answering_ = false;
  int looks_ = 0;  // since the client was seen to send no more
  std::function<void()> on_gone_;
  std::deque<std::string> unsent_;
  size_t unsent_bytes_ = 0;
  size_t long_piece_ = 0;     // bytes of one above the limit, until it is sent
  bool writes_long_ = false;  // it is in writing_
  std::string writing_;
  size_t written_bytes_ = 0;  // of writing_
  bool is_writing_ = false;
  bool last_ = false;  // the answer is all in unsent_
  bool close_when_sent_ = false;
};

}  // namespace baton::engine::http
