// Timelines as Perfetto has them (Chrome trace events), and how much of some spans lies in others.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace baton::engine {

// A stretch of time, in microseconds.
struct Interval {
  double begin = 0;
  double end = 0;
};

// Sorted, without overlaps.
std::vector<Interval> merged(std::vector<Interval> intervals);
// Both merged() already.
double overlap_us(const std::vector<Interval>& a, const std::vector<Interval>& b);
double length_us(const std::vector<Interval>& intervals);

// A complete event ("ph": "X").
struct TraceSpan {
  std::string category;
  int64_t process = 0;
  int64_t request = 0;
  uint64_t bytes = 0;
  Interval time;
};

// JSON with an array "traceEvents". InvalidArgument for anything else.
absl::StatusOr<nlohmann::json> parse_trace(std::string_view text);
// The spans in their order. InvalidArgument: the text is not such a trace.
absl::StatusOr<std::vector<TraceSpan>> read_spans(std::string_view text);

}  // namespace baton::engine
