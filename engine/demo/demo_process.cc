// The demo's worker processes: forks them, and exchanges lines of JSON with them.
#include "engine/demo/demo_process.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/files/json_fields.h"
#include "transport/base/child.h"

namespace baton::engine::demo {

using nlohmann::json;

absl::Status send_line(int socket, const json& value) {
  std::string line = value.dump(-1, ' ', false, json::error_handler_t::replace);
  line += '\n';
  for (size_t at = 0; at < line.size();) {
    const ssize_t sent = send(socket, line.data() + at, line.size() - at, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return absl::UnavailableError(std::strerror(errno));
    at += static_cast<size_t>(sent);
  }
  return absl::OkStatus();
}

absl::StatusOr<json> receive_line(int socket, std::string* buffer) {
  for (;;) {
    if (const size_t end = buffer->find('\n'); end != std::string::npos) {
      absl::StatusOr<json> value = parse_json(std::string_view(*buffer).substr(0, end), "a line");
      buffer->erase(0, end + 1);
      return value;
    }
    char piece[65536];
    const ssize_t size = recv(socket, piece, sizeof(piece), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return absl::UnavailableError(std::strerror(errno));
    if (size == 0) return absl::UnavailableError("it has closed the connection");
    buffer->append(piece, static_cast<size_t>(size));
  }
}

DemoProcess::DemoProcess(std::string name, pid_t pid, int socket)
    : name_(std::move(name)), pid_(pid), socket_(socket) {}

absl::StatusOr<std::unique_ptr<DemoProcess>> DemoProcess::fork(const DemoProcessOptions& options) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(absl::StrCat("socketpair failed: ", std::strerror(errno)));
  }
  const pid_t pid = base::fork_child();
  if (pid < 0) {
    const int error = errno;
    close(sockets[0]);
    close(sockets[1]);
    return absl::UnavailableError(absl::StrCat("fork failed: ", std::strerror(error)));
  }
  if (pid == 0) {
    close(sockets[0]);
    run_demo_worker(options, sockets[1]);
    _exit(0);
  }
  close(sockets[1]);
  return std::unique_ptr<DemoProcess>(new DemoProcess(options.name, pid, sockets[0]));
}

DemoProcess::~DemoProcess() {
  // Not only close(): children forked later hold copies of this end.
  shutdown(socket_, SHUT_RDWR);
  close(socket_);
  for (int i = 0; i < 500; ++i) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
    usleep(10000);
  }
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

absl::StatusOr<json> DemoProcess::call(const json& command) {
  absl::Status status = send_line(socket_, command);
  absl::StatusOr<json> reply = json();
  if (status.ok()) {
    reply = receive_line(socket_, &buffer_);
    status = reply.status();
  }
  if (!status.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the ", name_, " process (pid ", pid_, ") is gone: ", status.message()));
  }
  if (const std::string error = string_field(*reply, "error", "").value_or(""); !error.empty()) {
    return absl::InternalError(absl::StrCat("the ", name_, " process: ", error));
  }
  return reply;
}

}  // namespace baton::engine::demo
