// Asks the workers how they are, all at once and again and again. Internal to engine/router;
// everything runs on the loop's thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/http/http_fetch.h"
#include "engine/router/relayed_request.h"
#include "transport/clock.h"

namespace baton::engine::router {

struct HealthOptions {
  std::chrono::milliseconds interval{1000};
  std::chrono::milliseconds timeout = patient(std::chrono::milliseconds(2000));
  int misses = 2;
};

class HealthWatch {
 public:
  // `on_down` hears of a decode worker that was up and has missed its probes.
  HealthWatch(HealthOptions options, Workers& workers, std::function<void(size_t)> on_down);

  // One round. `done` runs when every worker has answered or missed.
  void probe_all(std::function<void()> done);
  // Rounds for ever.
  void run();

 private:
  struct Probe {
    std::unique_ptr<http::HttpFetch> fetch;
    int status = 0;
    std::string body;
    bool silent = false;  // no answer, and no refusal either
    int missed = 0;       // in a row
  };

  void probe(Probe& probe, const http::HttpUrl& url, const char* path, std::function<void()> done);
  void judge_decode(size_t worker);
  void judge_prefill(size_t worker);

  const HealthOptions options_;
  Workers& workers_;
  const std::function<void(size_t)> on_down_;
  std::vector<Probe> decode_, prefill_;
  size_t open_ = 0;  // probes of this round
  std::unique_ptr<http::EventLoop::Timer> next_;
};

}  // namespace baton::engine::router
