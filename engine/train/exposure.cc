// Computes exposed communication: unions and intersections of a timeline's spans, per process.
#include "engine/train/exposure.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "engine/files/json_fields.h"

namespace baton::engine::train {
namespace {

constexpr double kLatest = 1e18;  // microseconds

struct Stretch {
  double begin = 0;
  double end = 0;
};

struct Tracks {
  std::vector<Stretch> communication, wait, compute;
};

std::vector<Stretch> united(std::vector<Stretch> spans) {
  std::sort(spans.begin(), spans.end(),
            [](const Stretch& a, const Stretch& b) { return a.begin < b.begin; });
  std::vector<Stretch> out;
  for (const Stretch& span : spans) {
    if (out.empty() || span.begin > out.back().end) {
      out.push_back(span);
    } else {
      out.back().end = std::max(out.back().end, span.end);
    }
  }
  return out;
}

double length(const std::vector<Stretch>& spans) {
  double sum = 0;
  for (const Stretch& span : spans) sum += span.end - span.begin;
  return sum;
}

// The total length of what is in both; each is already a union.
double common(const std::vector<Stretch>& a, const std::vector<Stretch>& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].end, b[j].end) - std::max(a[i].begin, b[j].begin));
    a[i].end < b[j].end ? ++i : ++j;
  }
  return sum;
}

absl::StatusOr<nlohmann::json> parse_trace(std::string_view text) {
  absl::StatusOr<nlohmann::json> json = parse_json(text, "the timeline");
  if (!json.ok()) return json.status();
  if (!member(*json, "traceEvents").is_array()) {
    return absl::InvalidArgumentError(
        "the timeline has no \"traceEvents\": give a file that `baton train --timeline` wrote");
  }
  return json;
}

}  // namespace

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
  absl::StatusOr<nlohmann::json> json = parse_trace(trace);
  if (!json.ok()) return json.status();
  std::map<int64_t, Tracks> processes;
  Exposure exposure;
  for (const nlohmann::json& event : member(*json, "traceEvents")) {
    const auto phase = string_field(event, "ph", "");
    const auto category = string_field(event, "cat", "");
    if (!phase.ok() || !category.ok() || *phase != "X") continue;
    const auto process = int_field(event, "pid", 0, int64_t{1} << 32, 0);
    const auto begin = number_field(event, "ts", 0, kLatest, 0);
    const auto duration = number_field(event, "dur", 0, kLatest, 0);
    const auto bytes = int_field(member(event, "args"), "bytes", 0, int64_t{1} << 48, 0);
    for (const absl::Status& status :
         {process.status(), begin.status(), duration.status(), bytes.status()}) {
      if (!status.ok()) return status;
    }
    Tracks& tracks = processes[*process];
    const Stretch span{*begin, *begin + *duration};
    if (*category == "communication") {
      tracks.communication.push_back(span);
      exposure.calls += 1;
      exposure.bytes += static_cast<uint64_t>(*bytes);
    } else if (*category == "wait") {
      tracks.wait.push_back(span);
    } else if (*category == "compute") {
      tracks.compute.push_back(span);
    }
  }
  for (const auto& [process, tracks] : processes) {
    if (tracks.compute.empty()) continue;  // no rank
    ++exposure.ranks;
    const std::vector<Stretch> communication = united(tracks.communication);
    exposure.communication_us += length(communication);
    exposure.exposed_us += common(communication, united(tracks.wait));
    exposure.compute_us += length(united(tracks.compute));
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
