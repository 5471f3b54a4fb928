// Reads spans, and adds intervals up.
#include "engine/files/trace_spans.h"

#include <algorithm>

#include "engine/files/json_fields.h"

namespace baton::engine {

std::vector<Interval> merged(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& next : intervals) {
    if (!out.empty() && next.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, next.end);
    } else {
      out.push_back(next);
    }
  }
  return out;
}

double overlap_us(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return sum;
}

double length_us(const std::vector<Interval>& intervals) {
  double sum = 0;
  for (const Interval& interval : intervals) sum += interval.end - interval.begin;
  return sum;
}

absl::StatusOr<nlohmann::json> parse_trace(std::string_view text) {
  absl::StatusOr<nlohmann::json> json = parse_json(text, "the timeline");
  if (!json.ok() || member(*json, "traceEvents").is_array()) return json;
  return absl::InvalidArgumentError(
      "the timeline has no array \"traceEvents\": give a file that --timeline wrote");
}

absl::StatusOr<std::vector<TraceSpan>> read_spans(std::string_view text) {
  constexpr double kLatest = 1e18;
  const absl::StatusOr<nlohmann::json> json = parse_trace(text);
  if (!json.ok()) return json.status();
  std::vector<TraceSpan> spans;
  for (const nlohmann::json& event : member(*json, "traceEvents")) {
    if (string_field(event, "ph", "").value_or("") != "X") continue;
    const nlohmann::json& arguments = member(event, "args");
    const auto process = int_field(event, "pid", 0, INT64_MAX, 0);
    const auto request = int_field(arguments, "request", 0, INT64_MAX, 0);
    const auto bytes = int_field(arguments, "bytes", 0, INT64_MAX, 0);
    const auto begin = number_field(event, "ts", 0, kLatest, 0);
    const auto duration = number_field(event, "dur", 0, kLatest, 0);
    for (const absl::Status& status :
         {process.status(), request.status(), bytes.status(), begin.status(), duration.status()}) {
      if (!status.ok()) return status;
    }
    spans.push_back({string_field(event, "cat", "").value_or(""),
                     *process,
                     *request,
                     static_cast<uint64_t>(*bytes),
                     {*begin, *begin + *duration}});
  }
  return spans;
}

}  // namespace baton::engine
