// The driver's calls as lines of text, in the order in which they returned: what a real driver
// answered, for tests to compare their fake with (tests/gpudirect/trace/).
//
//   baton-gpu-trace 2 13000
//   1 cuMemCreate 0 >0x3e8 2097152 {1,0,1} 0x0
//
// Which thread made a call, counted as they come; its name, its result, its arguments. ">" is
// before what it has answered, "-" stands for what says nothing. Addresses and handles are those of
// the process that was recorded; no bytes of memory are in it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "gpudirect/driver.h"

namespace baton::gpudirect {

// The table with each call recorded to `file`, which is made anew; one at a time in a process, from
// its first call to the end. Lines are written at once, so that a crash leaves them.
absl::StatusOr<Driver> record_calls(const Driver& driver, const std::string& file);
// Ends the recording; the table that record_calls() gave is not used any more.
void stop_recording();

}  // namespace baton::gpudirect
