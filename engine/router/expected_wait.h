// How long a worker may show nothing before its request is asked of another one as well.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "transport/clock.h"

namespace baton::engine::router {

// Learns from what requests waited for. To their first token they wait in proportion to what their
// worker had to compute by then, theirs included; between two tokens for a step. A wait is strange
// when it is three times as long as all but a twentieth of those before it would lead to expect,
// and never below a floor. Before enough was seen, ten floors are. Not thread-safe.
class ExpectedWait {
 public:
  // Zero: no wait is ever strange.
  explicit ExpectedWait(std::chrono::milliseconds floor) : floor_(floor) {}

  bool ever() const { return floor_ > Time::zero(); }
  // `work`: see WorkerPicker::Pick.
  void note_first_token(size_t work, Time took);
  void note_gap(Time took);

  Time first_token_limit(size_t work) const;
  Time gap_limit() const;

 private:
  static constexpr double kStrange = 3;
  static constexpr double kUsual = 0.95;
  static constexpr int kUnknown = 10;
  static constexpr size_t kEnough = 8;

  // The last so many, in seconds.
  class Samples {
   public:
    void add(double value);
    size_t size() const { return values_.size(); }
    double usual() const { return usual_; }

   private:
    static constexpr size_t kKept = 256;
    std::vector<double> values_;
    size_t next_ = 0;
    double usual_ = 0;
  };
  Time limit(const Samples& samples, double scale) const;

  const Time floor_;
  Samples per_work_, gaps_;
};

}  // namespace baton::engine::router
