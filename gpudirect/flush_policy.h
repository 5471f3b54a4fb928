// Whether a device sees what adapters have written to its memory when a completion has said so, and
// what has to be done before any reader is told where it does not.
#pragma once

#include "absl/status/status.h"
#include "gpudirect/facts.h"

namespace baton::gpudirect {

// The reader is the device that has the memory: a kernel or a wait that may be running already.
// (One that is launched later sees the bytes in any case; no code here knows when it was.)
enum class FlushPolicy : uint8_t {
  kNone,        // its writes are ordered
  kCall,        // cuFlushGPUDirectRDMAWrites() first
  kImpossible,  // nothing that the host can do orders them: no adapter may write there
};

// By what the device says of itself, and by that alone.
FlushPolicy flush_policy(const DeviceFacts& facts);
const char* words(FlushPolicy policy);

// OK, or FailedPrecondition: adapters' writes are not ordered, and the host cannot flush them.
absl::Status can_be_ordered(const Driver& driver, const DeviceFacts& facts);
// Whether adapters can be given a device's memory: OK, or in one line why it is staged instead.
absl::Status reachable_by_adapters(const Driver& driver, const DeviceFacts& facts);
// Whether they can be given its addresses instead, which takes a kernel module.
absl::Status reachable_by_address(const Driver& driver, const DeviceFacts& facts, bool module);
// Whether that module is loaded; sysfs lies below `root`.
bool peermem_loaded(const std::string& root);

}  // namespace baton::gpudirect
