// Counts, rates, percentiles, and the table of them.
#include "engine/load/load.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "engine/files/utf8.h"
#include "engine/serve/metrics.h"

namespace baton::engine::load {
namespace {

using nlohmann::json;

double ms(Time time) { return std::chrono::duration<double, std::milli>(time).count(); }

struct Metric {
  const char* name;
  const char* title;
  const char* label;
};
constexpr std::array kMetrics = {
    Metric{"ttft", "Time to First Token", "TTFT"},
    Metric{"tpot", "Time per Output Token (excl. 1st token)", "TPOT"},
    Metric{"itl", "Inter-token Latency", "ITL"},
    Metric{"e2el", "End-to-end Latency", "E2EL"},
    Metric{"queued", "In the Queue", "queued"},
    Metric{"kv_wait", "Waiting for KV", "KV wait"},
};

// The values of one answer; for itl the gaps. Empty where it does not apply.
std::vector<double> values_of(std::string_view metric, const Answer& answer) {
  if (metric == "ttft") return {ms(answer.first)};
  if (metric == "e2el") return {ms(answer.end)};
  if (metric == "queued") return {ms(answer.queued)};
  if (metric == "kv_wait") {
    return answer.kv_wait > Time{} ? std::vector<double>{ms(answer.kv_wait)}
                                   : std::vector<double>();
  }
  if (metric == "tpot") {
    return answer.output > 1 ? std::vector<double>{ms(answer.per_token())} : std::vector<double>();
  }
  std::vector<double> gaps;
  for (const Time gap : answer.gaps) gaps.push_back(ms(gap));
  return gaps;
}

// "p99", "p99.9".
std::string percentile_name(double percentile) { return absl::StrFormat("p%g", percentile); }

void add_metric(json& report, const std::string& name, const std::vector<double>& values,
                const ReportOptions& options) {
  double sum = 0, squares = 0;
  for (const double value : values) sum += value;
  const double mean = values.empty() ? 0 : sum / static_cast<double>(values.size());
  for (const double value : values) squares += (value - mean) * (value - mean);
  report["mean_" + name + "_ms"] = mean;
  report["median_" + name + "_ms"] = serve::percentile(values, 50);
  report["std_" + name + "_ms"] =
      values.empty() ? 0 : std::sqrt(squares / static_cast<double>(values.size()));
  for (const double percentile : options.percentiles) {
    report[percentile_name(percentile) + "_" + name + "_ms"] =
        serve::percentile(values, percentile);
  }
}

json details(const std::vector<Answer>& answers) {
  json out{{"input_lens", json::array()},  {"output_lens", json::array()},
           {"start_times", json::array()}, {"ttfts", json::array()},
           {"itls", json::array()},        {"e2els", json::array()},
           {"errors", json::array()}};
  for (const Answer& answer : answers) {
    out["input_lens"].push_back(answer.input);
    out["output_lens"].push_back(answer.ok() ? answer.output : 0);
    out["start_times"].push_back(seconds_of(answer.sent));
    out["ttfts"].push_back(seconds_of(answer.first));
    out["e2els"].push_back(seconds_of(answer.end));
    out["errors"].push_back(answer.error);
    json gaps = json::array();
    for (const Time gap : answer.gaps) gaps.push_back(seconds_of(gap));
    out["itls"].push_back(std::move(gaps));
  }
  return out;
}

struct Row {
  std::string label, key;
};

std::vector<Row> rows_of(const ReportOptions& options) {
  std::vector<Row> rows = {{"Successful requests:", "completed"},
                           {"Failed requests:", "failed"},
                           {"Benchmark duration (s):", "duration"},
                           {"Total input tokens:", "total_input_tokens"},
                           {"Total generated tokens:", "total_output_tokens"},
                           {"Tokens found in a cache:", "total_cached_tokens"},
                           {"Tokens loaded from prefill:", "total_kv_loaded_tokens"},
                           {"KV loads that failed:", "kv_loads_failed"},
                           {"Request throughput (req/s):", "request_throughput"}};
  rows.push_back({"Output token throughput (tok/s):", "output_throughput"});
  rows.push_back({"Total token throughput (tok/s):", "total_token_throughput"});
  rows.push_back({"Peak concurrent requests:", "max_concurrent_requests"});
  for (const Metric& metric : kMetrics) {
    const std::string name = metric.name;
    if (std::find(options.metrics.begin(), options.metrics.end(), name) == options.metrics.end()) {
      continue;
    }
    rows.push_back({metric.title, ""});
    const auto row = [&](const std::string& kind, const std::string& key) {
      rows.push_back({absl::StrCat(kind, " ", metric.label, " (ms):"), key + "_" + name + "_ms"});
    };
    row("Mean", "mean");
    row("Median", "median");
    for (const double percentile : options.percentiles) {
      const std::string key = percentile_name(percentile);
      row("P" + key.substr(1), key);
    }
  }
  return rows;
}

std::string shown(const json& value) {
  return value.is_number_float() ? absl::StrFormat("%.2f", value.get<double>()) : value.dump();
}

// For rates and times; counts have no ratio.
std::string ratio(const json& value, const json& first) {
  if (!value.is_number_float() || !first.is_number_float() || first.get<double>() <= 0) return "";
  return absl::StrFormat("%.2fx", value.get<double>() / first.get<double>());
}

}  // namespace

absl::StatusOr<std::vector<double>> parse_percentiles(std::string_view text) {
  std::vector<double> out;
  for (const auto part : absl::StrSplit(view(text), ',')) {
    double value = 0;
    if (!absl::SimpleAtod(part, &value) || !(value > 0) || value > 100) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\" is not a percentile: give a number above 0 and at most 100"));
    }
    out.push_back(value);
  }
  return out;
}

LoadResult joined(std::vector<LoadResult> rounds) {
  LoadResult out;
  for (LoadResult& round : rounds) {
    for (Answer& answer : round.answers) {
      answer.sent += out.duration;
      out.answers.push_back(std::move(answer));
    }
    out.duration += round.duration;
    out.most_open = std::max(out.most_open, round.most_open);
  }
  return out;
}

json report_of(const LoadResult& result, const ReportOptions& options) {
  const double seconds = seconds_of(result.duration);
  const auto rate = [&](size_t things) {
    return seconds > 0 ? static_cast<double>(things) / seconds : 0.0;
  };
  size_t completed = 0, input = 0, output = 0, cached = 0, loaded = 0, kv_failed = 0;
  for (const Answer& answer : result.answers) {
    if (!answer.ok()) continue;
    ++completed;
    input += answer.input;
    output += answer.output;
    cached += answer.cached;
    loaded += answer.loaded;
    kv_failed += answer.kv_error.empty() ? 0 : 1;
  }
  json report = {{"completed", completed},
                 {"failed", result.answers.size() - completed},
                 {"duration", seconds},
                 {"total_input_tokens", input},
                 {"total_output_tokens", output},
                 {"total_cached_tokens", cached},
                 {"total_kv_loaded_tokens", loaded},
                 {"kv_loads_failed", kv_failed},
                 {"request_throughput", rate(completed)},
                 {"output_throughput", rate(output)},
                 {"total_token_throughput", rate(input + output)},
                 {"max_concurrent_requests", result.most_open}};
  for (const std::string& metric : options.metrics) {
    std::vector<double> values;
    for (const Answer& answer : result.answers) {
      if (!answer.ok()) continue;
      const std::vector<double> own = values_of(metric, answer);
      values.insert(values.end(), own.begin(), own.end());
    }
    add_metric(report, metric, values, options);
  }
  if (options.detailed) report.update(details(result.answers));
  return report;
}

std::string table_of(const std::vector<std::pair<std::string, json>>& reports,
                     const ReportOptions& options) {
  const std::vector<Row> rows = rows_of(options);
  const auto empty = [&](const Row& row) {  // of what only Baton's servers say
    return std::all_of(reports.begin(), reports.end(), [&](const auto& report) {
      return !report.second.contains(row.key) || report.second[row.key] == 0;
    });
  };
  const std::set<std::string> optional = {"total_cached_tokens", "total_kv_loaded_tokens",
                                          "kv_loads_failed"};
  std::string out;
  if (reports.size() > 1) {
    absl::StrAppendFormat(&out, "%-36s", "");
    for (size_t i = 0; i < reports.size(); ++i) {
      absl::StrAppendFormat(&out, " %14s%s", reports[i].first, i == 0 ? "" : "        ");
    }
    out += "\n";
  }
  for (const Row& row : rows) {
    if (row.key.empty()) {
      absl::StrAppend(&out, row.label, "\n");
      continue;
    }
    if (optional.contains(row.key) && empty(row)) continue;
    absl::StrAppendFormat(&out, "%-36s", row.label);
    const json& first = reports.front().second[row.key];
    for (size_t i = 0; i < reports.size(); ++i) {
      const json& value = reports[i].second[row.key];
      absl::StrAppendFormat(&out, " %14s", shown(value));
      if (i > 0) absl::StrAppendFormat(&out, " %7s", ratio(value, first));
    }
    out += "\n";
  }
  return out;
}

}  // namespace baton::engine::load
