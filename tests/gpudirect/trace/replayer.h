// Replays a recorded trace of the driver's calls (gpudirect/driver.h) against the fake: the
// fake is made what the recorded driver said of itself, gets the same calls, and what it answers
// otherwise is told. Where the two differ it is the fake that is wrong.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::gpudirect {

struct Replay {
  struct Difference {
    enum class Kind { kStricter, kLooser, kOther };  // of the fake
    Kind kind = Kind::kOther;
    size_t line = 0;
    std::string what;
  };
  size_t calls = 0;     // replayed and compared
  size_t left_out = 0;  // of memory that the trace does not know, or launches of kernels
  std::vector<Difference> differences;
  // "trace.txt:17: cuMemCreate: the driver answered 0, the fake 2 (stricter)", one a line.
  std::string text(const std::string& name) const;
};

// InvalidArgument: it is no such trace, or a line of it is malformed.
absl::StatusOr<Replay> replay(const std::string& file);

}  // namespace baton::gpudirect
