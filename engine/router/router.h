// The router: one address for a set of prefill and decode workers.
//
// For each request it picks a prefill and a decode worker (engine/router/worker_picker.h), tells
// decode where the prompt's KV can be had, and streams the tokens back. When a worker dies, before
// or during a stream, another goes on: no token is repeated and none is lost. A worker that is only
// slow, or full, is not taken for dead: its health is asked for by itself, and what it refuses
// (429) is offered to the others once and then refused here. All retries together stay below a
// part of the requests (engine/router/retry_budget.h).
//
// Paths as engine/http/http_server.h has them, without /v1/baton/address. Neither requests nor
// streams cost threads.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_listener.h"
#include "transport/clock.h"

namespace baton::engine::router {

struct RouterOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                   // 0: any free port
  std::vector<std::string> prefill;  // URLs; none: decode workers compute prompts themselves
  std::vector<std::string> decode;   // at least one
  int max_retries = 3;               // in a row without a new token
  std::chrono::milliseconds health_interval{1000};
  // A worker that does not answer this many probes in a row, each within health_timeout, is down:
  // what it was asked is given to others.
  int health_misses = 2;
  std::chrono::milliseconds health_timeout = patient(std::chrono::milliseconds(2000));
  std::string api_key;  // of clients, and for workers; "": none
  http::HttpListenerOptions listener;
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
