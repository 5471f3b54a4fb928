// Fuzzes the HTTP server with whatever a client sends: the bytes behind the first go to a real
// listener, in two pieces, and the client then says that nothing follows. Whatever comes is
// answered or hung up on, in no more answers than there can be heads in it, each of them HTTP.

#include <arpa/inet.h>
#include <sys/time.h>

#include "engine/http/http_listener.h"
#include "tests/fuzz/expect.h"
#include "tests/std.h"

namespace {

using baton::engine::http::HttpExchange;
using baton::engine::http::HttpListener;

int port() {
  static HttpListener& listener = *[] {
    auto* made = new HttpListener({.max_head = 4096, .max_body = 8192});
    made->route("POST", "/echo", [](const std::shared_ptr<HttpExchange>& exchange) {
      exchange->reply(200, "text/plain", exchange->request().body);
    });
    made->route("GET", "/pieces", [](const std::shared_ptr<HttpExchange>& exchange) {
      exchange->begin(200, "text/plain");
      exchange->write("one");
      exchange->write("two");
      exchange->end();
    });
    expect(made->listen("127.0.0.1", 0).ok());
    return made;
  }();
  return listener.port();
}

int dial() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port()));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  expect(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
  const timeval limit{.tv_sec = 60, .tv_usec = 0};  // only a server that hangs comes to that
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return fd;
}

// A server that has hung up takes no more.
void send_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

std::string read_all(int fd) {
  std::string in;
  char bytes[16 << 10];
  while (true) {
    const ssize_t got = ::recv(fd, bytes, sizeof bytes, 0);
    expect(got >= 0 || errno == ECONNRESET);
    if (got <= 0) return in;
    in.append(bytes, static_cast<size_t>(got));
  }
}

size_t count(std::string_view text, std::string_view what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + 1)) {
    ++found;
  }
  return found;
}

// Its head is made of printable lines: nothing that a client said splits it.
void check_head(std::string_view head) {
  for (size_t i = 0; i < head.size(); ++i) {
    const bool line_ends = head.substr(i, 2) == "\r\n";
    if (line_ends) ++i;
    expect(line_ends || static_cast<unsigned char>(head[i]) >= ' ');
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t first = bytes.size() * data[0] / 256;
  const int fd = dial();
  send_all(fd, bytes.substr(0, first));
  send_all(fd, bytes.substr(first));
  ::shutdown(fd, SHUT_WR);
  const std::string answers = read_all(fd);
  ::close(fd);
  if (answers.empty()) return 0;
  expect(answers.starts_with("HTTP/1.1 "));
  const size_t end = answers.find("\r\n\r\n");
  expect(end != std::string::npos);
  check_head(std::string_view(answers).substr(0, end));
  // What it echoes may look like anything, so this counts only where nothing was echoed.
  if (count(bytes, "HTTP/1.1 ") == 0) {
    expect(count(answers, "HTTP/1.1 ") <= 2 * (count(bytes, "\n") + 1));
  }
  return 0;
}
