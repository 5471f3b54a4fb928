// The demo's worker processes: forked before any thread exists, driven over a socket pair with one
// line of JSON per command and reply.
//
//   {"do": "start", "link": "80MB/s", "serialized": false, "providers": [],
//    "settings": []}  -> {"address": ...}
//   {"do": "run", "prefill": ADDRESS, "together": false, "requests": [...]}  -> {"outcomes": [...]}
//   {"do": "stop"}                -> {"timeline": {...}, "route": ..., "bytes": ...}
//
// Any reply may be {"error": MESSAGE} instead.
#pragma once

#include <sys/types.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/serve/engine.h"

namespace baton::engine::demo {

struct DemoProcessOptions {
  std::string name;      // for messages and timelines
  bool session = false;  // it moves KV to or from another
  std::string model;
  std::string secret;  // cluster key of this demo
  int cpu = 0;         // that computes
};

// The parent's handle. The child ends with it, and with the parent.
class DemoProcess {
 public:
  static absl::StatusOr<std::unique_ptr<DemoProcess>> fork(const DemoProcessOptions& options);
  ~DemoProcess();
  DemoProcess(const DemoProcess&) = delete;
  DemoProcess& operator=(const DemoProcess&) = delete;

  // Sends a command and waits for its reply. Unavailable if the process has died.
  absl::StatusOr<nlohmann::json> call(const nlohmann::json& command);

 private:
  DemoProcess(std::string name, pid_t pid, int socket);
  const std::string name_;
  const pid_t pid_;
  const int socket_;
  std::string buffer_;
};

// Lines over a stream socket. receive() gives Unavailable at the end of the stream.
absl::Status send_line(int socket, const nlohmann::json& value);
absl::StatusOr<nlohmann::json> receive_line(int socket, std::string* buffer);

// What the child does: serves commands on `socket` until the other end is closed.
void run_demo_worker(const DemoProcessOptions& options, int socket);

}  // namespace baton::engine::demo
