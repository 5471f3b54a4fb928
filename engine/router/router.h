// The router: one address for a set of prefill and decode workers.
//
// For each request it picks a prefill and a decode worker by what they were given before and how
// busy they are (engine/router/workers.h), tells decode where the prompt's KV can be had, and
// streams the tokens back. When a worker dies, before or during a stream, another goes on: no token
// is repeated and none is lost. A worker that is only slow, or full, is not taken for dead: its
// health is asked for by itself, and what it refuses (429) is offered to the others once and then
// refused here. Retries of what a worker answered with an error stay below a part of the requests
// (RetryBudget); what a dead worker was asked is asked of another in any case.
//
// Workers may be `baton serve` or another make's that speaks vLLM's kv_transfer_params, as halves
// of pairs too (engine/router/prefill_ask.h); what each is, its answers tell (health_watch.h).
//
// Paths as engine/http/http_server.h has them, without /v1/baton/address. Neither requests nor
// streams cost threads.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_listener.h"
#include "transport/clock.h"

namespace baton::engine::router {

struct RouterOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free port
  // URLs.
  std::vector<std::string> prefill;  // none: decode workers compute prompts themselves
  std::vector<std::string> decode;   // at least one
  // A file that lists them instead (engine/router/workers.h). It is looked at every
  // health_interval: workers that are new are asked how they are and used, those that are gone get
  // nothing new and end what they have. A file that is wrong changes nothing, and is described in
  // the log.
  std::string workers_file;
  int max_retries = 3;  // in a row without a new token
  // A request whose decode worker died waits this long for one to come back if no other is up.
  std::chrono::milliseconds comeback = patient(std::chrono::seconds(10));
  std::chrono::milliseconds health_interval{1000};
  // A worker that does not answer this many probes in a row, each within health_timeout, is down:
  // what it was asked is given to others.
  int health_misses = 2;
  std::chrono::milliseconds health_timeout = patient(std::chrono::milliseconds(2000));
  std::string api_key;  // of clients, and for workers; "": none
  // For workers whose URL is https: a PEM file of the CAs of their certificates; "": the
  // system's.
  std::string worker_ca;
  // Bytes of the bodies of requests that are not answered yet, together; what comes beyond is told
  // to come again (429). A body is in memory up to five times while it is read.
  size_t max_bodies = size_t{512} << 20;
  http::HttpListenerOptions listener;
};

// Keeps no state that matters: a request that a dead router had in flight is simply sent again.
class Router {
 public:
  // InvalidArgument without decode workers, or with a malformed URL or list; AlreadyExists if the
  // port is taken. Workers need not be up yet.
  static absl::StatusOr<std::unique_ptr<Router>> start(RouterOptions options);
  ~Router();

  // As HttpServer's (engine/http/http_server.h): refuses what comes, ends in order, ends at once.
  void drain();
  bool drained() const;
  void end_requests();

  int port() const;

 private:
  struct Impl;
  explicit Router(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine::router
