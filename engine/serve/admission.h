// Whether a request can still be answered in time. What cannot is refused at once: queues without
// end make every answer late, and then all work is done for clients that have left.
//
// Two things are measured: how many requests a second the engine answers, and how long clients wait
// before they leave. All requests under way share the engine's steps, so of n requests and a new
// one the last is answered when n + 1 have been; the new one is taken if that is within that time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "transport/clock.h"

namespace baton::engine::serve {

struct AdmissionOptions {
  // Requests in the queue, of which every choice is one. What finds a place in the batch does not
  // wait: with 0 nothing else is taken.
  size_t max_waiting = 1024;
  // Longest expected time to a stream's first token, or to a whole answer; 0: as long as clients
  // are seen to wait.
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

// Not thread-safe (EngineThread guards it). `now` never goes back.
class Admission {
 public:
  explicit Admission(AdmissionOptions options) : options_(options) {}

  // A request of so many choices. `stream`: its client waits for the first token, others for the
  // last. ResourceExhausted, with what is expected, if it could not be answered in time: the
  // status' payload kRetryAfter says in how many seconds it may be otherwise.
  absl::Status admit(const Backlog& backlog, bool stream, size_t choices, Time now);
  static constexpr char kRetryAfter[] = "retry_after";  // as engine/http/http_listener.h

  // A step took `busy`. `unbegun` requests had no token before it; `begun` of them have one now.
  void computed(size_t unbegun, size_t begun, Time busy);
  // An answer is complete.
  void answered(bool stream);
  // A client left unanswered after `waited`. Where no request was `waiting` the
  // client had reasons of its own, and teaches nothing.
  void left(bool stream, Time waited, size_t waiting, Time now);

  // Longest expected time that is accepted now; nothing: any.
  std::optional<Time> limit(bool stream, Time now) const;
  uint64_t refused() const { return refused_; }

 private:
  // How long clients wait before they leave, as far as lately any did.
  struct Patience {
    std::deque<std::pair<Time, Time>> leavers;  // when, after how long
    std::optional<Time> value;
    Time learned{};
    Time used{};
    double planned = 0.9;  // the part of it that is planned for: less when many leave all the same
    Time shrunk{};
  };
  // How many requests a second came out, while there were some: decaying sums. At first the rate is
  // as if the next one came now.
  struct Served {
    double requests = 0, seconds = 0;
    void add(double more);
    double rate() const { return seconds > 0 ? std::max(requests, 1.0) / seconds : 0; }
  };
  absl::Status refuse(std::string_view why, double again);
  bool knows(const Patience& patience, Time now) const;

  const AdmissionOptions options_;
  Served answers_, first_tokens_;
  std::array<Patience, 2> patience_;  // of whole answers, of streams
  uint64_t refused_ = 0;
};

}  // namespace baton::engine::serve
