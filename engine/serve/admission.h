// Whether a request can still be answered in time. What cannot is refused at once: queues without
// end make every answer late, and then all work is done for clients who have left.
//
// Three things are measured: how many tokens the engine gets done per second, how long its backlog
// took against what was expected, and how long clients wait before they leave. A request is taken
// if the backlog in front of it will be done before that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "absl/status/statusor.h"
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

// What is under way. Tokens still to be computed: of prompts, and of output as far as it is
// expected.
struct Backlog {
  size_t waiting = 0;             // requests for which a step had no room
  size_t arriving = 0;            // ... and which no step has seen
  size_t free_places = SIZE_MAX;  // in the batch, for both
  size_t prompt_tokens = 0;
  size_t output_tokens = 0;
};

struct WorkAhead {
  size_t prompt_tokens = 0;  // of all choices
  size_t max_output = 0;     // of each
  bool stream = false;       // its client waits for the first token, others for the last
  size_t choices = 1;
};

// Not thread-safe (EngineThread guards it). `now` never goes back.
class Admission {
 public:
  explicit Admission(AdmissionOptions options) : options_(options) {}

  // The time that the work up to the answer takes at the present rate, for answered() and left();
  // what is expected of it is corrected by how that came out lately. ResourceExhausted, with what
  // is expected, if that is too long: the status' payload kRetryAfter says in how many seconds it
  // may be otherwise.
  absl::StatusOr<Time> admit(const Backlog& backlog, const WorkAhead& work, Time now);
  static constexpr char kRetryAfter[] = "retry_after";  // as engine/http/http_listener.h

  // A step took `busy` and brought the backlog `tokens` further.
  void computed(size_t tokens, Time busy);
  // An answer came, of `output` tokens, after `actual`; admit() had said `expected`.
  void answered(bool stream, Time expected, Time actual, size_t output);
  // A client left unanswered after `waited`.
  void left(bool stream, Time expected, Time waited, Time now);

  // Output to expect of a choice that may have `max_output`.
  size_t expected_output(size_t max_output) const;
  // Tokens per second; 0 before anything was computed.
  double rate() const { return busy_ > 0 ? tokens_ / busy_ : 0; }
  // Longest expected time that is accepted now; nothing: any.
  std::optional<Time> limit(bool stream, Time now) const;
  uint64_t refused() const { return refused_; }

 private:
  void note_ratio(double ratio);

  // How long clients wait before they leave, as far as lately any did.
  struct Patience {
    std::deque<std::pair<Time, Time>> leavers;  // when, after how long
    std::optional<Time> value;
    Time learned{};
    Time used{};
    double planned = 0.5;  // the part of it that is planned for: less when many leave all the same
  };

  const AdmissionOptions options_;
  double tokens_ = 0, busy_ = 0;  // decaying sums
  double bias_ = 1;               // what things take against what was expected
  double mean_output_ = 64;
  std::array<Patience, 2> patience_;  // of whole answers, of streams
  uint64_t refused_ = 0;
};

}  // namespace baton::engine::serve
