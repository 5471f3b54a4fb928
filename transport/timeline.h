// Timelines: what ran when, exported as Perfetto (Chrome trace event) JSON.
//
// One timeline serves a whole process; several processes on one machine share CLOCK_MONOTONIC, so
// their files can be joined by concatenating the events.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "transport/clock.h"

namespace baton {

struct Span {
  std::string_view track;  // must be a literal or outlive the timeline: "compute", "tx"
  std::string name;        // "layer 3"
  Time begin{};
  Time end{};
  uint64_t request = 0;  // groups what belongs together; 0: none
  uint64_t bytes = 0;
};

// Thread-safe. Records nothing after `capacity` spans, and says so in dropped().
class Timeline {
 public:
  explicit Timeline(std::string process_name, size_t capacity = 1 << 18);
  void add(Span span);
  std::vector<Span> spans() const;
  size_t dropped() const;

  // {"traceEvents": [...]}: X events with ts and dur in microseconds, pid = process id, cat = the
  // track's name, tid = its number (thread_name events say which), args {"request", "bytes"}.
  std::string to_json() const;
  absl::Status write(const std::string& path) const;

 private:
  const std::string process_name_;
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
  size_t dropped_ = 0;
};

}  // namespace baton
