// How long a worker may show nothing before it is asked how it is, and before its request is asked
// of another one as well.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "transport/clock.h"

namespace baton::engine::router {

// Learns from what requests waited for. To their first token they wait in proportion to what their
// worker had to compute by then, theirs included; between two tokens for a step. A wait is strange
// when it is three times as long as all but a twentieth of those before it would lead to expect,
// and never below a floor. Before enough was seen, ten floors are.
//
// A worker that is busy makes its requests wait, and to ask for them twice would make it worse: so
// the floor is a second, unless one is given. What costs next to nothing is to ask a worker how it
// is: that is done by the gaps between tokens, above a floor of its own, and who does not answer,
// by what answers usually take, is stuck (Pulse). Where a floor is given no worker is asked.
//
// Not thread-safe.
class ExpectedWait {
 public:
  // `floor`: zero: no wait is ever strange. `ask_floor`: of questions.
  explicit ExpectedWait(std::optional<std::chrono::milliseconds> floor,
                        std::chrono::milliseconds ask_floor = kAskFloor)
      : floor_(floor.value_or(patient(kFloor))), ask_floor_(ask_floor), asks_(!floor.has_value()) {}

  bool ever() const { return floor_ > Time::zero(); }
  bool asks() const { return asks_; }
  // `work`: see WorkerPicker::Pick.
  void note_first_token(size_t work, Time took);
  void note_gap(Time took);
  void note_answer(Time took);  // of a worker that was asked how it is

  Time first_token_limit(size_t work) const;
  Time gap_limit() const;
  // The router asks a worker for its health after it has sent nothing for this long.
  Time ask_limit() const;
  // A worker that has not answered by then is stuck.
  Time answer_limit() const;

  static constexpr std::chrono::milliseconds kFloor{1000}, kAskFloor{50};

 private:
  static constexpr double kStrange = 3;
  static constexpr double kUsual = 0.95;
  // For answers to probes: many may come from workers that had been stuck.
  static constexpr double kStrangeAnswer = 10;
  static constexpr double kUsualAnswer = 0.5;
  static constexpr int kUnknown = 10;
  static constexpr size_t kEnough = 8;

  // The last so many, in seconds.
  class Samples {
   public:
    explicit Samples(double part) : part_(part) {}
    void add(double value);
    size_t size() const { return values_.size(); }
    double usual() const { return usual_; }

   private:
    static constexpr size_t kKept = 256;
    const double part_;
    std::vector<double> values_;
    size_t next_ = 0;
    double usual_ = 0;
  };
  static Time limit(const Samples& samples, double scale, Time floor);

  const Time floor_, ask_floor_;
  const bool asks_;
  Samples per_work_{kUsual}, gaps_{kUsual}, answers_{kUsualAnswer};
};

// Decides whether a worker that owes an answer is alive: by what it sends, and when it sends
// nothing, by whether it answers a health question. The caller passes the time. Not thread-safe.
class Pulse {
 public:
  // The worker has sent something. A question that is under way gets as much time as a new one.
  void heard(Time now) {
    heard_ = now;
    stuck_ = false;
    if (asked_.has_value()) asked_ = now;
  }
  // The question has come to its end, answered or not.
  void end_question() { asked_.reset(); }
  // It answers, and says that it gets nowhere.
  void set_stuck() { stuck_ = true; }

  struct Look {
    bool stuck = false;
    bool ask = false;  // now: that counts as done
  };
  Look look(Time now, const ExpectedWait& waits) {
    if (asked_.has_value() && now - *asked_ >= waits.answer_limit()) stuck_ = true;
    const bool ask = !asked_.has_value() && now - heard_ >= waits.ask_limit();
    if (ask) asked_ = now;
    return {stuck_, ask};
  }

 private:
  Time heard_{};
  std::optional<Time> asked_;  // since when
  bool stuck_ = false;
};

}  // namespace baton::engine::router
