// Hears from every worker of Baton's what it has cached (GET /v1/baton/kv_events).
// Internal to engine/router; everything runs on the loop's thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "engine/http/http_fetch.h"
#include "engine/router/workers.h"

namespace baton::engine::router {

// If a worker's stream ends or is malformed, its cache is unknown until the stream has restarted.
class CacheWatch {
 public:
  CacheWatch(Workers& workers, std::chrono::milliseconds again)
      : workers_(workers), again_(again) {}

  // Starts to follow the worker's cache, and never stops.
  void follow(WorkerGroup& group, size_t worker);
  void leave(const WorkerGroup& group, size_t worker);
  // Forgets what the worker told: it does not answer, so the state may be stale.
  void restart(WorkerGroup& group, size_t worker);
  // Streams that broke off.
  uint64_t lost() const { return lost_; }

  // A worker that sends more without a line's end is not believed.
  static constexpr size_t kMaxLine = size_t{64} << 20;

 private:
  struct Follower {
    WorkerGroup* group = nullptr;
    size_t worker = 0;
    std::unique_ptr<http::HttpFetch> fetch;
    std::unique_ptr<http::EventLoop::Timer> next;
    int status = 0;
    std::string line;    // what has come of it
    bool begun = false;  // the snapshot is here
    bool said = false;   // that there is none
  };
  void begin(Follower& follower);
  absl::Status receive(Follower& follower, std::string_view bytes);
  void broken(Follower& follower, const absl::Status& why);

  Workers& workers_;
  const std::chrono::milliseconds again_;
  uint64_t lost_ = 0;
  std::map<std::pair<const WorkerGroup*, size_t>, Follower> followers_;
};

}  // namespace baton::engine::router
