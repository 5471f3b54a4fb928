// Whether an adapter that has registered memory of a device also moves its bytes: there are pairs
// of the two that register and then cannot, or reach other bytes. Found out by a queue pair that is
// connected to itself, before a caller relies on the registration.
#pragma once

#include "absl/status/status.h"
#include "verbs/device/device.h"

namespace baton::verbs {

// A few bytes at both ends of the region as the adapter reads them, beside what the device says is
// there; nothing of it is written. And once for each device and way: bytes that the adapter writes
// to memory of ours there. `port` is up. The region is registered there in that way; the reason
// why it must not be used.
absl::Status prove_region(Port& port, const Tuning& tuning, const RegionEntry& region,
                          Device::Way way);

}  // namespace baton::verbs
