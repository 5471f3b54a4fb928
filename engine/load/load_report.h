// What a load has come to, with the definitions and the JSON keys of `vllm bench serve`.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/load/load.h"

namespace baton::engine::load {

struct ReportOptions {
  // Latencies to report: ttft (to the first token), tpot (per further token), itl (between two
  // tokens), e2el (to the last one), and for Baton's servers queued and kv_wait.
  std::vector<std::string> metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> percentiles = {99};
  // An answer is good if none of these took longer, in ms: ttft, tpot, e2el.
  std::map<std::string, double> goodput;
  bool detailed = false;  // every request, too
};

// "ttft:500" -> {"ttft", 500}. InvalidArgument saying what it may be.
absl::StatusOr<std::pair<std::string, double>> parse_goodput(std::string_view text);
// "50,90,99.9", each above 0 and at most 100; "ttft,itl".
absl::StatusOr<std::vector<double>> parse_percentiles(std::string_view text);
absl::StatusOr<std::vector<std::string>> parse_metrics(std::string_view text);

// Answers to the same requests in several loads are one: durations add up.
LoadResult joined(std::vector<LoadResult> rounds);

nlohmann::json report_of(const LoadResult& result, const ReportOptions& options);

// For people: a line for each figure, a column for each (name, report), and behind every one but
// the first its ratio to it.
std::string table_of(const std::vector<std::pair<std::string, nlohmann::json>>& reports,
                     const ReportOptions& options);

}  // namespace baton::engine::load
