// Time in seconds, and the end of what a stream has.
#pragma once

#include <chrono>

#include "gpudirect/device.h"
#include "tests/must.h"
#include "transport/clock.h"

namespace baton::gpudirect {

inline const std::chrono::seconds kRigPatience = patient(std::chrono::seconds(30));

inline double rig_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void wait_for(const Device& device, Stream stream) {
  const Device::Current current(device);
  const double end = rig_now() + std::chrono::duration<double>(kRigPatience).count();
  Result result = kNotReady;
  while ((result = device.driver().cuStreamQuery(stream)) == kNotReady) {
    if (rig_now() > end) throw Failed(absl::DeadlineExceededError("a stream does not end"));
  }
  must(device.check(result, "waiting for a stream"));
}

}  // namespace baton::gpudirect
