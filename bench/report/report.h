// The results of a benchmark: one row per measurement, as JSON for machines and as a table for
// people.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "nlohmann/json.hpp"
#include "transport/base/quantile.h"

namespace baton::bench {

// The distribution of a latency, in microseconds.
struct Latency {
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double p999 = 0;
  double max = 0;

  static Latency of(std::vector<double> microseconds);
};

// A rate that was measured several times.
struct Rate {
  double median = 0;
  double min = 0;
  double max = 0;
  size_t samples = 0;

  static Rate of(const std::vector<double>& samples);
};

using Json = nlohmann::ordered_json;

// Something else that did the same job: the floor of a row, or a baseline.
struct Reference {
  std::string name;  // "memcpy", "plain_sockets", "ucx_tcp"
  double gb_per_s = 0;
  std::string note;  // for people: what exactly it was
};

// GB is 10^9 bytes. Members that do not apply stay empty and are left out of the JSON.
struct Row {
  std::string bench;
  Json params = Json::object();
  std::string route;
  size_t bytes = 0;    // of one transfer
  size_t pieces = 0;   // contiguous runs in one transfer
  double seconds = 0;  // of one transfer, median
  Rate gb_per_s;       // over the repetitions
  std::optional<Latency> latency_us;
  double submit_us = 0;  // of that, in submit(): median
  std::optional<Reference> floor;
  std::vector<Reference> baselines;
  std::optional<double> cpu_percent;  // of one core
  std::optional<bool> verified;       // every byte was checked in this run

  double ratio_to_floor() const { return floor ? ratio_to(*floor) : 0; }
  double ratio_to(const Reference& reference) const;
  double pieces_per_s() const { return seconds > 0 ? static_cast<double>(pieces) / seconds : 0; }
  Json to_json() const;
};

// Text from the command line may be no UTF-8: that is replaced instead of thrown at. `indent` -1:
// one line.
std::string dump(const Json& json, int indent = -1);

// Writes what `flag` names ("--json"): write_file_atomically(), with an error that names both.
absl::Status write_text(const std::string& path, const std::string& text, const char* flag);
// One JSON object per line, after --json.
absl::Status write_json(const std::string& path, absl::Span<const Row> rows);
absl::Status write_lines(const std::string& path, const std::vector<Json>& rows);

// "4.0 KiB", "64 MiB".
std::string human_bytes(size_t bytes);
// "2.61 M", "730 k".
std::string human_count(double count);

// Text in columns: the first left-aligned, the others right-aligned, each as wide as it must be.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) { rows_.push_back(std::move(heads)); }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace baton::bench
