// Whether a request can still be answered in time. What cannot is refused at once: queues without
// end make every answer late, and then all work is done for clients that have left.
//
// How many requests a second the engine answers is measured. All requests under way share the
// engine's steps, so of n requests and a new one the last is answered when n + 1 have been; the new
// one is taken if that is within the operator's limit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "transport/clock.h"

namespace baton::engine::serve {

struct AdmissionOptions {
  // Requests in the queue, of which every choice is one. What finds a place in the batch does not
  // wait: with 0 nothing else is taken.
  size_t max_waiting = 1024;
  // Longest expected time to a stream's first token, or to a whole answer; 0: any.
  Time max_wait{0};
};

// What is under way, without what other engines have asked for.
struct Backlog {
  size_t requests = 0;       // in the engine, waiting or in the batch
  size_t unbegun = 0;        // of these, without a token yet
  size_t waiting = 0;        // of these, that a step had no room for
  size_t arriving = 0;       // others, which no step has seen
  size_t places = SIZE_MAX;  // in the batch
};

// Not thread-safe (EngineThread guards it).
class Admission {
 public:
  explicit Admission(AdmissionOptions options) : options_(options) {}

  // A request of so many choices. `stream`: its client waits for the first token, others for the
  // last. ResourceExhausted, with what is expected, if it could not be answered in time: the
  // status' payload kRetryAfter says in how many seconds it may be otherwise.
  absl::Status admit(const Backlog& backlog, bool stream, size_t choices);
  static constexpr char kRetryAfter[] = "retry_after";  // as engine/http/http_listener.h

  // A step took `busy`. `unbegun` requests had no token before it; `begun` of them have one now.
  void computed(size_t unbegun, size_t begun, Time busy);
  // An answer is complete.
  void answered() { answers_.add(1); }

  uint64_t refused() const { return refused_; }

 private:
  // How many requests a second came out, while there were some: decaying sums. At first the rate is
  // as if the next one came now.
  struct Served {
    double requests = 0, seconds = 0;
    void add(double more);
    double rate() const { return seconds > 0 ? std::max(requests, 1.0) / seconds : 0; }
  };
  absl::Status refuse(std::string_view why, double again);

  const AdmissionOptions options_;
  Served answers_, first_tokens_;
  uint64_t refused_ = 0;
};

}  // namespace baton::engine::serve
