// Computes overlap from a timeline: interval arithmetic over its events.
#include "engine/demo/overlap.h"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/files/json_fields.h"

namespace baton::engine::demo {

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

absl::StatusOr<Overlap> measure_overlap(std::string_view text) {
  const absl::StatusOr<nlohmann::json> timeline = parse_json(text, "the timeline");
  if (!timeline.ok()) return timeline.status();
  const nlohmann::json& events = member(*timeline, "traceEvents");
  if (!events.is_array()) {
    return absl::InvalidArgumentError("the timeline has no array \"traceEvents\"");
  }
  struct Spans {
    std::vector<Interval> transfer, compute;
  };
  std::map<std::pair<int64_t, int64_t>, Spans> requests;  // by process and request
  Overlap total;
  for (const nlohmann::json& event : events) {
    if (string_field(event, "ph", "").value_or("") != "X") continue;
    const std::string track = string_field(event, "cat", "").value_or("");
    if (track != "transfer" && track != "compute") continue;
    const auto pid = int_field(event, "pid", 0, INT64_MAX, 0);
    const auto request = int_field(member(event, "args"), "request", 0, INT64_MAX, 0);
    const auto bytes = int_field(member(event, "args"), "bytes", 0, INT64_MAX, 0);
    const auto begin = number_field(event, "ts", 0, 1e18, 0);
    const auto duration = number_field(event, "dur", 0, 1e18, 0);
    for (const absl::Status& status :
         {pid.status(), request.status(), bytes.status(), begin.status(), duration.status()}) {
      if (!status.ok()) return status;
    }
    Spans& spans = requests[{*pid, *request}];
    (track == "transfer" ? spans.transfer : spans.compute).push_back({*begin, *begin + *duration});
    if (track == "transfer") total.bytes += static_cast<uint64_t>(*bytes);
  }
  for (auto& [key, spans] : requests) {
    const std::vector<Interval> transfer = merged(std::move(spans.transfer));
    const std::vector<Interval> compute = merged(std::move(spans.compute));
    if (transfer.empty()) continue;
    total.transfer_us += length_us(transfer);
    total.compute_us += length_us(compute);
    total.hidden_us += overlap_us(transfer, compute);
    ++total.requests;
  }
  return total;
}

}  // namespace baton::engine::demo
