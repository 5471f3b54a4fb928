// What the server and the router share: an httplib server that listens on a thread of its own.
#pragma once

#include <httplib.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/status/status.h"

namespace baton::engine::http {

class HttpListener {
 public:
  // One thread per connection served at the same time.
  explicit HttpListener(int connections);
  // Closes all connections once their handlers return.
  ~HttpListener();

  // Register handlers here before listen().
  httplib::Server& server() { return server_; }
  // Binds and starts serving. Unavailable, with the remedy, if the port cannot be had.
  absl::Status listen(const std::string& host, int port);
  int port() const { return port_; }
  // Set when the listener goes down: long handlers should return.
  bool stopping() const { return stopping_; }
  // Makes handlers return and joins the thread.
  void stop();

 private:
  httplib::Server server_;
  std::atomic<bool> stopping_{false};
  int port_ = 0;
  std::thread thread_;
};

// Sends {"error": ...} with the status that fits.
void reply_error(const absl::Status& status, httplib::Response* response);

}  // namespace baton::engine::http
