// A slot for work on a stream: an event behind the work tells when it has ended.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gpudirect/device.h"
#include "transport/clock.h"

namespace baton::gpudirect {

// How long polling for the end of work may fail, by errors other than the device's loss.
// Consecutive errors. Until the limit the memory of the work is not given back, since it may still
// be written; without a limit, a driver that never reports the end would block its callers for
// ever.
class PollErrorLimit {
 public:
  void succeeded() { errors_ = 0; }
  // Counts one more error. True if there were many for a long time: stop polling.
  bool reached() {
    const Time now = Clock::steady().now();
    if (errors_++ == 0) first_ = now;
    return errors_ >= kMany && now - first_ >= kLong;
  }

 private:
  static constexpr uint32_t kMany = 1000;
  static constexpr Time kLong = std::chrono::seconds(1);

  uint32_t errors_ = 0;
  Time first_{};
};

// `what` the work is, for texts: "a copy".
struct StreamSlot {
  Event event = nullptr;
  bool busy = false;
  bool recorded = false;  // else the stream itself is asked
  PollErrorLimit poll_errors;
  absl::Status status;  // of the work so far

  // With the device's context current.
  absl::Status make(const Device& device, const char* what) {
    Event made = nullptr;
    absl::Status done = device.check(device.driver().cuEventCreate(&made, kEventDisableTiming),
                                     absl::StrCat("making an event for ", what));
    if (done.ok()) event = made;
    return done;
  }
  // Records the event behind work that was queued, all or part of it. `current`: whether the
  // device's context could be made current.
  void record(const Device& device, Stream stream, const char* what, absl::Status current) {
    if (current.ok()) {
      current = device.check(device.driver().cuEventRecord(event, stream),
                             absl::StrCat("waiting for ", what));
    }
    recorded = current.ok();
    status.Update(current);
    poll_errors.succeeded();
    busy = true;
  }
  // True when the work touches memory no more; then `status` says how it ended. Never blocks.
  bool over(const Device& device, Stream stream, const char* what) {
    absl::Status asked;
    {
      const Device::Current current(device);
      asked = current.status();
      if (asked.ok()) {
        const Result result =
            recorded ? device.driver().cuEventQuery(event) : device.driver().cuStreamQuery(stream);
        if (result == kNotReady) {
          poll_errors.succeeded();
          return false;
        }
        asked = device.check(result, absl::StrCat("waiting for ", what));
      }
    }
    status.Update(asked);
    if (!asked.ok() && device.alive().ok() && !poll_errors.reached()) return false;
    busy = false;
    status.Update(device.alive());
    return true;
  }
};

}  // namespace baton::gpudirect
