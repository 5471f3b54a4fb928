// Computes exposed communication from a timeline's spans, per process.
#include "engine/train/exposure.h"

#include <map>

#include "absl/strings/str_format.h"
#include "engine/files/trace_spans.h"

namespace baton::engine::train {
std::string Exposure::to_string() const {
  return absl::StrFormat(
      "%u ranks, %u calls, %.1f MB\n"
      "computing            %10.1f ms\n"
      "communicating        %10.1f ms\n"
      "  of that exposed    %10.1f ms\n"
      "overlap efficiency   %10.3f   (1 - exposed / communicating)\n",
      ranks, calls, static_cast<double>(bytes) / 1e6, compute_us / 1e3, communication_us / 1e3,
      exposed_us / 1e3, efficiency());
}

absl::StatusOr<Exposure> measure_exposure(std::string_view trace) {
  const absl::StatusOr<std::vector<TraceSpan>> spans = read_spans(trace);
  if (!spans.ok()) return spans.status();
  struct Tracks {
    std::vector<Interval> communication, wait, compute;
  };
  std::map<int64_t, Tracks> processes;
  Exposure exposure;
  for (const TraceSpan& span : *spans) {
    Tracks& tracks = processes[span.process];
    if (span.category == "communication") {
      tracks.communication.push_back(span.time);
      exposure.calls += 1;
      exposure.bytes += span.bytes;
    } else if (span.category == "wait") {
      tracks.wait.push_back(span.time);
    } else if (span.category == "compute") {
      tracks.compute.push_back(span.time);
    }
  }
  for (const auto& [process, tracks] : processes) {
    if (tracks.compute.empty()) continue;  // no rank
    ++exposure.ranks;
    const std::vector<Interval> communication = merged(tracks.communication);
    exposure.communication_us += length_us(communication);
    exposure.exposed_us += overlap_us(communication, merged(tracks.wait));
    exposure.compute_us += length_us(merged(tracks.compute));
  }
  if (exposure.ranks == 0) {
    return absl::InvalidArgumentError(
        "the timeline has no \"compute\" spans: give a file that `baton train --timeline` wrote");
  }
  return exposure;
}

absl::StatusOr<std::string> join_traces(const std::vector<std::string>& traces) {
  nlohmann::json joined = {{"displayTimeUnit", "ms"}, {"traceEvents", nlohmann::json::array()}};
  for (const std::string& trace : traces) {
    absl::StatusOr<nlohmann::json> json = parse_trace(trace);
    if (!json.ok()) return json.status();
    for (nlohmann::json& event : (*json)["traceEvents"]) {
      joined["traceEvents"].push_back(std::move(event));
    }
  }
  return joined.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace baton::engine::train
