// A client of an OpenAI-compatible server: asks for one streamed answer, and notes when each part
// of it came.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/http/event_loop.h"
#include "engine/http/http_fetch.h"
#include "engine/load/workload.h"
#include "transport/clock.h"

namespace baton::engine::load {

struct Server {
  http::HttpUrl url;
  std::string model;  // "": what the server has
  std::string key;    // of its API; "": none
  double temperature = 0.7;
};

// Times count from when the request was sent.
struct Answer {
  std::string error;       // why it is not whole; "": it is
  Time sent{};             // after the load's beginning
  Time first{};            // to the first token
  Time end{};              // to the last token
  std::vector<Time> gaps;  // between tokens
  size_t input = 0;        // tokens of the prompt, as the server counted them
  size_t output = 0;       // tokens of the answer
  size_t cached = 0;       // of the prompt, found in a cache
  // Extra facts from Baton's servers: the prompt tokens whose KV came from a prefill worker; the
  // time in the queue and the wait for KV; the reason why KV had to be computed after all.
  size_t loaded = 0;
  Time queued{};
  Time kv_wait{};
  std::string kv_error;

  bool ok() const { return error.empty(); }
  // For each token behind the first.
  Time per_token() const {
    return output > 1 ? (end - first) / static_cast<int64_t>(output - 1) : Time{};
  }
};

// The server's model name and its tokenizer. Each call waits up to 60 s for the answer; do not call
// it on the loop's thread. Unavailable, with the remedy, if the server does not answer.
absl::StatusOr<std::string> model_of(const std::shared_ptr<http::EventLoop>& loop,
                                     const Server& server);
absl::StatusOr<Words> words_of(const std::shared_ptr<http::EventLoop>& loop, const Server& server,
                               std::string_view text);

// Sends the request and calls `done` once, on the loop's thread, on which this is to be called,
// too. Dropping what is returned cancels. `seed`: of the sampling.
std::unique_ptr<http::HttpFetch> ask(const std::shared_ptr<http::EventLoop>& loop,
                                     const Server& server, const LoadRequest& request,
                                     uint64_t seed, std::chrono::milliseconds timeout,
                                     std::function<void(Answer)> done);

}  // namespace baton::engine::load
