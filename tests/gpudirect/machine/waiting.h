// Time in seconds, and the end of what a stream has.
#pragma once

#include <chrono>
#include <thread>

#include "gpudirect/device.h"
#include "transport/clock.h"

namespace baton::gpudirect {

inline const std::chrono::seconds kRigPatience = patient(std::chrono::seconds(30));

inline double rig_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline absl::Status wait_for(const Device& device, Stream stream,
                             std::chrono::microseconds between = {}) {
  const Device::Current current(device);
  const double end = rig_now() + std::chrono::duration<double>(kRigPatience).count();
  Result result = kNotReady;
  while (result == kNotReady) {
    result = device.driver().cuStreamQuery(stream);
    if (result == kNotReady && between.count() > 0) std::this_thread::sleep_for(between);
    if (result == kNotReady && rig_now() > end) {
      return absl::DeadlineExceededError("a stream does not end");
    }
  }
  return device.check(result, "waiting for a stream");
}

}  // namespace baton::gpudirect
