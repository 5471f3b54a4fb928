// How quickly a rail moves bytes, as its slices show: a NIC that is slow, or loses packets, must
// not have as much of a transfer as the one beside it. No call asks the system, which knows how
// fast a port is and nothing of the way behind it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "transport/clock.h"

namespace baton::internal {

class RailPace {
 public:
  static constexpr uint64_t kCounts = 64 << 10;  // slices of fewer bytes tell of latency only
  static constexpr uint64_t kSample = 256 << 10;
  // Under way at most on one of which nothing is known.
  static constexpr uint64_t kUntried = 2 << 20;
  static constexpr Time kForgotten = std::chrono::seconds(10);
  static constexpr Time kSilent = std::chrono::milliseconds(100);
  // A rail that is slower than the best by less than this factor counts as equal: load and chance
  // differ as much.
  static constexpr double kSlow = 4;

  // A slice is on it; or is not any more, unmoved; or has been moved.
  void took(uint64_t bytes, Time now) {
    if (open_ == 0) {
      since_ = last_ = now;
      moved_ = 0;
    }
    open_ += bytes;
  }
  void gave_back(uint64_t bytes) { open_ -= std::min(open_, bytes); }
  void moved(uint64_t bytes, Time now) {
    gave_back(bytes);
    moved_ += bytes;
    last_ = now;
    const Time span = now - since_;
    const bool enough = moved_ >= kSample && (span >= kShortest || open_ == 0);
    if (span <= Time::zero() || (!enough && span < kLongest)) return;
    const double rate = static_cast<double>(moved_) / std::chrono::duration<double>(span).count();
    rate_ = known(now) ? (rate_ + rate) / 2 : rate;
    since_ = measured_ = now;
    moved_ = 0;
  }

  bool busy() const { return open_ > 0; }
  double rate() const { return rate_; }  // bytes per second, when it was last seen; 0: never
  bool known(Time now) const { return rate_ > 0 && now - measured_ < kForgotten; }
  // Whether it has as much as it may have before anything is known of it; or anything new.
  bool untried(double most = kUntried) const {
    return rate_ == 0 && static_cast<double>(open_) >= most;
  }
  bool tried_enough(Time now, double most = kUntried) const {
    return untried(most) || (rate_ > 0 && open_ > 0 && !known(now));
  }
  // How long nothing has ended on it, if that is long; zero otherwise.
  Time silent(Time now) const {
    return open_ > 0 && now - last_ >= kSilent ? now - last_ : Time::zero();
  }
  // Of `best`, the quickest one's rate: 1 for all that are about as quick, or not known.
  double part_of(double best, Time now) const {
    return known(now) && rate_ * kSlow <= best ? rate_ / best : 1;
  }

 private:
  static constexpr Time kShortest = std::chrono::milliseconds(1);
  static constexpr Time kLongest = std::chrono::milliseconds(50);

  uint64_t open_ = 0;   // bytes under way
  uint64_t moved_ = 0;  // since then, without a pause
  Time since_{};
  Time last_{};  // something ended
  double rate_ = 0;
  Time measured_{};
};

}  // namespace baton::internal
