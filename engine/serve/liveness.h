// Whether an engine gets on with its work, for whoever asks from another thread and may not wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "transport/clock.h"

namespace baton::engine::serve {

// Marks the status with which an engine that has stopped for good refuses requests: callers with
// another engine should ask that one, and this one no longer.
inline constexpr char kStoppedPayload[] = "engine_stopped";
inline absl::Status stopped_status(const std::string& why) {
  absl::Status status = absl::UnavailableError(why);
  status.SetPayload(kStoppedPayload, absl::Cord());
  return status;
}

// The engine's thread tells what it does; any thread may ask, and takes no lock for it.
class Liveness {
 public:
  explicit Liveness(const Clock& clock) : clock_(clock), moved_(clock.now().count()) {}

  // From the engine's thread: a step begins.
  void begin_step() {
    if (!busy_.exchange(true)) moved();
    asked_ = false;
  }
  // It got somewhere, in the middle of a step too: a layer is computed.
  void moved() { moved_.store(clock_.now().count(), std::memory_order_relaxed); }
  // `advanced`: something was computed or has changed. `owes`: there is something to compute all
  // the same.
  void end_step(bool advanced, bool owes) {
    if (advanced || !owes) moved();
    busy_ = owes;
  }
  // For good; the first reason counts.
  void stop(std::string why = "the engine has stopped") {
    if (stopped_) return;
    why_ = std::move(why);
    stopped_ = true;
  }

  // From any thread: it was asked for something.
  void asked() {
    if (!busy_ && !asked_.exchange(true)) moved();
  }
  bool stopped() const { return stopped_; }
  // Why it stopped, if it has.
  const std::string& why_stopped() const { return why_; }
  // How long it has had work and got nowhere; zero where it has none.
  Time quiet() const {
    if (!busy_ && !asked_) return Time::zero();
    return std::max(Time::zero(), clock_.now() - Time(moved_.load(std::memory_order_relaxed)));
  }

 private:
  const Clock& clock_;
  std::atomic<Time::rep> moved_;  // when it last got somewhere
  std::atomic<bool> busy_{false};
  std::atomic<bool> asked_{false};  // and has not looked since
  std::string why_;                 // written before stopped_, and never again
  std::atomic<bool> stopped_{false};
};

}  // namespace baton::engine::serve
