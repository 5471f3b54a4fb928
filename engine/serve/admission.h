// Whether a request can still be answered in time. What cannot is refused at once: queues without
// end make every answer late, and then all work is done for clients that have left.
//
// Two things are measured: what a step of the engine costs, and how long clients wait before they
// leave. A request is taken if, by what steps cost, it will be answered within that time, and none
// that was taken before will be late for its sake (requests/forecast.h). One that waits in the
// queue until it is too late is refused when its turn comes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/serve/requests/forecast.h"
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
  // The same one by one, in the order in which they are computed; left out where Admission has no
  // limit to hold them against, and of a long queue what is behind kListed.
  std::vector<Pending> batch, queue;
  StepSizes sizes;
  static constexpr size_t kListed = 256;
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

  // ResourceExhausted, with what is expected, if it could not be answered in time, or others could
  // not for its sake: the status' payload kRetryAfter says in how many seconds it may be otherwise.
  absl::Status admit(const Backlog& backlog, const WorkAhead& work, Time now);
  static constexpr char kRetryAfter[] = "retry_after";  // as engine/http/http_listener.h
  // The waiting requests whose turn is now and that cannot be answered before their clients
  // leave. Counts them as refused.
  std::vector<uint64_t> too_late(const Backlog& backlog, Time now);

  // A step took `busy`; it computed `computed` tokens, and brought the backlog `tokens` further.
  void computed(size_t tokens, size_t computed, Time busy);
  void computed(size_t tokens, Time busy) { this->computed(tokens, tokens, busy); }
  // An answer came, of `output` tokens; `part` of its prompt's tokens were computed for it.
  void answered(bool stream, size_t output, double part = 1);
  // A client left unanswered after `waited`.
  void left(bool stream, Time waited, Time now);

  // Output to expect of a choice that may have `max_output`.
  size_t expected_output(size_t max_output) const;
  // Tokens per second; 0 before anything was computed.
  double rate() const { return busy_ > 0 ? tokens_ / busy_ : 0; }
  // Longest expected time that is accepted now; nothing: any.
  std::optional<Time> limit(bool stream, Time now) const;
  bool has_limit(Time now) const {
    return limit(false, now).has_value() || limit(true, now).has_value();
  }
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
  absl::Status refuse(std::string_view why, double again);
  StepCost cost() const;
  bool knows(const Patience& patience, Time now) const;
  // ... that clients wait, or a part of what they are seen to.
  std::optional<Time> longest(bool stream, Time now, double part = 1) const;
  // How late the latest choice of `work` will be answered, and whether others are late for it.
  struct Outlook {
    double expected = 0;
    bool harms = false;
  };
  Outlook look_ahead(const Backlog& backlog, const WorkAhead& work, Time now) const;
  // How many requests like one of these `choices` may come right behind them and leave them well
  // within the limit, if the engine has nothing else to do: at most as many as came lately.
  size_t followers_of(const Pending& choice, size_t choices, const StepSizes& sizes,
                      Time limit) const;
  // With what the prompts that wait will find in caches.
  std::vector<Pending> fresh_queue(const Backlog& backlog) const;

  const AdmissionOptions options_;
  double tokens_ = 0, busy_ = 0;  // decaying sums
  // Decaying sums over steps, of tokens (x) and seconds (y): their line of least squares.
  struct {
    double n = 0, x = 0, y = 0, xx = 0, xy = 0;
  } steps_;
  double mean_output_ = 64;
  double computed_part_ = 1;          // of prompts
  std::array<Patience, 2> patience_;  // of whole answers, of streams
  double arrived_ = 0;                // choices, decaying within a limit
  Time arrived_at_{};
  uint64_t refused_ = 0;
};

}  // namespace baton::engine::serve
