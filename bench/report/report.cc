// Benchmark results as JSON rows and as tables for people.
#include "bench/report/report.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/files/files.h"

namespace baton::bench {

Latency Latency::of(std::vector<double> microseconds) {
  std::sort(microseconds.begin(), microseconds.end());
  return {.p50 = base::sorted_quantile(microseconds, 0.5),
          .p90 = base::sorted_quantile(microseconds, 0.9),
          .p99 = base::sorted_quantile(microseconds, 0.99),
          .p999 = base::sorted_quantile(microseconds, 0.999),
          .max = base::sorted_quantile(microseconds, 1)};
}

Rate Rate::of(const std::vector<double>& samples) {
  if (samples.empty()) return {};
  const auto [least, most] = std::minmax_element(samples.begin(), samples.end());
  return {.median = baton::base::median(samples),
          .min = *least,
          .max = *most,
          .samples = samples.size()};
}

double Row::ratio_to(const Reference& reference) const {
  return reference.gb_per_s > 0 ? gb_per_s.median / reference.gb_per_s : 0;
}

Json Row::to_json() const {
  Json out;
  out["bench"] = bench;
  out["params"] = params;
  if (!route.empty()) out["route"] = route;
  if (bytes > 0) out["bytes"] = bytes;
  if (seconds > 0) out["seconds"] = seconds;
  if (gb_per_s.samples > 0) {
    out["GB_per_s"] = gb_per_s.median;
    out["GB_per_s_min"] = gb_per_s.min;
    out["GB_per_s_max"] = gb_per_s.max;
    out["repetitions"] = gb_per_s.samples;
    out["pages_per_s"] = pieces_per_s();
  }
  if (latency_us) {
    out["latency_us"] = {{"p50", latency_us->p50},
                         {"p90", latency_us->p90},
                         {"p99", latency_us->p99},
                         {"p999", latency_us->p999},
                         {"max", latency_us->max}};
  }
  if (submit_us > 0) out["submit_us"] = submit_us;
  if (floor) {
    out["floor"] = {{"name", floor->name}, {"GB_per_s", floor->gb_per_s}};
    out["ratio_to_floor"] = ratio_to_floor();
  }
  if (!baselines.empty()) {
    Json list = Json::array();
    for (const Reference& baseline : baselines) {
      list.push_back({{"name", baseline.name},
                      {"GB_per_s", baseline.gb_per_s},
                      {"ratio", ratio_to(baseline)}});
    }
    out["rivals"] = std::move(list);
  }
  if (cpu_percent) out["cpu_percent"] = *cpu_percent;
  if (verified) out["verified"] = *verified;
  return out;
}

std::string dump(const Json& json, int indent) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

absl::Status write_text(const std::string& path, const std::string& text, const char* flag) {
  const absl::Status status = engine::write_file_atomically(path, text);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("cannot write ", path, " (", status.message(),
                                   "): name a file that can be written after ", flag));
}

absl::Status write_json(const std::string& path, absl::Span<const Row> rows) {
  std::vector<Json> all;
  for (const Row& row : rows) all.push_back(row.to_json());
  return write_lines(path, all);
}

absl::Status write_lines(const std::string& path, const std::vector<Json>& rows) {
  std::string text;
  for (const Json& row : rows) absl::StrAppend(&text, dump(row), "\n");
  return write_text(path, text, "--json");
}

std::string human_bytes(size_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.4g %s", value, kUnits[unit]);
}

std::string human_count(double count) {
  if (count >= 1e9) return absl::StrFormat("%.3g G", count / 1e9);
  if (count >= 1e6) return absl::StrFormat("%.3g M", count / 1e6);
  if (count >= 1e4) return absl::StrFormat("%.3g k", count / 1e3);
  return absl::StrFormat("%.4g", count);
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      if (i > 0) line += "  ";
      line += i == 0 ? row[i] + pad : pad + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

}  // namespace baton::bench
