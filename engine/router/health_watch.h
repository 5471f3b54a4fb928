// Asks the workers how they are, all at once and again and again. Internal to engine/router;
// everything runs on the loop's thread.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/http/http_fetch.h"
#include "engine/router/workers.h"
#include "transport/clock.h"

namespace baton::engine::router {

struct HealthOptions {
  std::chrono::milliseconds interval{1000};
  std::chrono::milliseconds timeout = patient(std::chrono::milliseconds(2000));
  int misses = 2;
};

class HealthWatch {
 public:
  // `on_down` hears of a worker that was up and has missed its probes.
  HealthWatch(HealthOptions options, Workers& workers,
              std::function<void(WorkerGroup&, size_t)> on_down);

  // One round, of all workers that are there or still busy. `done` runs when every one has answered
  // or missed.
  void probe_all(std::function<void()> done);
  // Rounds for ever.
  void run();

 private:
  struct Probe {
    std::unique_ptr<http::HttpFetch> fetch;
    int status = 0;
    std::string body;
    bool silent = false;  // no answer, and no refusal either
    std::string why;      // there is no answer
    int missed = 0;       // in a row
  };

  void probe(Probe& probe, const KnownWorker& worker, const char* path, std::function<void()> done);
  static std::string describe(const Probe& probe);
  // It takes no more requests, and goes on with those that it has.
  static bool drains(const Probe& probe);
  void down(WorkerGroup& group, size_t worker, const Probe& probe);
  void down(WorkerGroup& group, size_t worker, std::string why, bool drains = false);
  // Takes from its answer which model it has.
  static void note_model(KnownWorker& worker, const nlohmann::json& page);
  // The agent that a `baton serve` reports.
  static KvAgent agent_in(const nlohmann::json& page);
  void judge_decode(size_t worker);
  // By its answer at kAddressPath; true: there is no such thing there, ask for its health.
  bool judge_prefill(size_t worker);
  // By its health: of another make than ours.
  void judge_other_prefill(size_t worker);
  void probe_decode(size_t worker, const std::function<void()>& done);
  void probe_prefill(size_t worker, const std::function<void()>& done);
  // The name that one of another make serves, for people; once.
  void probe_name(WorkerGroup& group, size_t worker, Probe& own, const std::function<void()>& done);
  // Those that lack a partner, once all have said what they are.
  void judge_pairs();

  const HealthOptions options_;
  Workers& workers_;
  const std::function<void(WorkerGroup&, size_t)> on_down_;
  std::deque<Probe> decode_, prefill_;  // which stay where they are when workers join
  size_t open_ = 0;                     // probes of this round
  std::unique_ptr<http::EventLoop::Timer> next_;
};

}  // namespace baton::engine::router
