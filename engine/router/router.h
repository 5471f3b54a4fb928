// The router: one address for a set of prefill and decode workers.
//
// For each request it picks a prefill and a decode worker (engine/router/worker_picker.h), tells
// decode where the prompt's KV can be had, and streams the tokens back. When a worker dies, before
// or during a stream, another goes on: no token is repeated and none is lost.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine::router {

struct RouterOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free port
  int connections = 64;
  std::vector<std::string> prefill;  // URLs; none: decode workers compute prompts themselves
  std::vector<std::string> decode;   // at least one
  int max_retries = 3;               // in a row without a new token
  std::chrono::milliseconds health_interval{1000};
  std::chrono::seconds read_timeout{120};  // a worker that is silent for so long is given up
};

// Keeps no state that matters: a request that a dead router had in flight is simply sent again.
class Router {
 public:
  // InvalidArgument without decode workers or with a malformed URL, Unavailable if the port is
  // taken. Workers need not be up yet.
  static absl::StatusOr<std::unique_ptr<Router>> start(RouterOptions options);
  ~Router();

  int port() const;

 private:
  struct Impl;
  explicit Router(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine::router
