// Sends a workload to a server, in time or as quickly as answers come, on one thread whatever the
// number of requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "engine/load/client.h"
#include "engine/load/workload.h"
#include "transport/clock.h"

namespace baton::engine::load {

struct LoadOptions {
  std::vector<Time> at;    // when each request is sent, in order; empty: at once
  size_t concurrency = 0;  // no more are open at a time: others wait for their turn; 0: all
  uint64_t seed = 1;
  std::chrono::milliseconds timeout = patient(std::chrono::milliseconds(600'000));  // of an answer
};

struct LoadResult {
  std::vector<Answer> answers;  // in the order of the requests
  Time duration{};
  size_t most_open = 0;  // requests at a time
};

// Waits for all answers. Not to be called on the loop's thread.
LoadResult run_load(const std::shared_ptr<http::EventLoop>& loop, const Server& server,
                    const std::vector<LoadRequest>& requests, const LoadOptions& options);

}  // namespace baton::engine::load
