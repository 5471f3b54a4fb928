// An httplib server on a thread of its own: binding, serving and stopping.
#include "engine/http/http_listener.h"

#include "absl/strings/str_cat.h"
#include "engine/http/openai_reply.h"

namespace baton::engine::http {

HttpListener::HttpListener(int connections) {
  server_.new_task_queue = [connections] {
    return new httplib::ThreadPool(static_cast<size_t>(connections));
  };
  // The default sets SO_REUSEPORT too, with which two servers would share a port unnoticed.
  server_.set_socket_options([](socket_t socket) {
    const int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  });
  server_.set_payload_max_length(size_t{16} << 20);
  server_.set_tcp_nodelay(true);
  server_.set_exception_handler(
      [](const httplib::Request&, httplib::Response& response, std::exception_ptr) {
        reply_error(absl::InternalError("the request could not be handled"), &response);
      });
}

HttpListener::~HttpListener() { stop(); }

absl::Status HttpListener::listen(const std::string& host, int port) {
  port_ = port;
  const bool bound =
      port == 0 ? (port_ = server_.bind_to_any_port(host)) > 0 : server_.bind_to_port(host, port);
  if (!bound) {
    return absl::UnavailableError(absl::StrCat(
        "listening for HTTP on ", host, ":", port,
        " failed: the port is taken or the address is not this machine's; try another --port"));
  }
  thread_ = std::thread([this] { server_.listen_after_bind(); });
  // stop() before the server runs would be forgotten.
  while (!server_.is_running()) std::this_thread::yield();
  return absl::OkStatus();
}

void HttpListener::stop() {
  stopping_ = true;
  server_.stop();
  if (thread_.joinable()) thread_.join();
}

void reply_error(const absl::Status& status, httplib::Response* response) {
  response->status = http_status(status);
  response->set_content(api_error(status), "application/json");
}

}  // namespace baton::engine::http
