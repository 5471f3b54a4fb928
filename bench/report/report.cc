// Benchmark results as JSON rows and as tables for people.
#include "bench/report/report.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::bench {
namespace {

// Text from the command line may be no UTF-8: replaced instead of thrown at.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

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

absl::Status write_json(const std::string& path, absl::Span<const Row> rows) {
  std::ofstream file(path, std::ios::trunc);
  for (const Row& row : rows) file << dump(row.to_json()) << '\n';
  file.flush();
  if (file.good()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "cannot write %s (%s): name a file that can be written after --json", path, strerror(errno)));
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
