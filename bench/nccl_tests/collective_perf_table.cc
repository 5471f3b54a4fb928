// nccl-tests' table: sizes, bandwidths, header, rows and footer.
#include "bench/nccl_tests/collective_perf_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/report/bench_memory.h"
#include "bench/report/report.h"
#include "engine/files/files.h"

namespace baton::bench {

CollectivePoint point_of(Measured collective, size_t bytes, int ranks, DataType type, ReduceOp op) {
  const size_t element = size_of(type);
  const size_t n = static_cast<size_t>(ranks);
  CollectivePoint point{.type = type, .op = op, .count = bytes / element};
  const bool wide_in = wide_input(collective), wide_out = wide_output(collective);
  if (wide_in || wide_out) point.count = point.count / n & ~(16 / element - 1);
  point.in_elements = wide_in ? point.count * n : point.count;
  point.out_elements = wide_out ? point.count * n : point.count;
  point.bytes = std::max(point.in_elements, point.out_elements) * element;
  return point;
}

std::vector<CollectivePoint> sweep(const CollectivePerfOptions& options, int ranks) {
  std::vector<size_t> sizes;
  for (size_t bytes = options.min_bytes; bytes <= options.max_bytes;) {
    sizes.push_back(bytes);
    const size_t next = options.step_factor > 1 ? std::max<size_t>(bytes, 1) * options.step_factor
                                                : bytes + options.step_bytes;
    if (next <= bytes) break;  // no larger size exists
    bytes = next;
  }
  std::vector<int> roots = {options.root};
  if (options.root == CollectivePerfOptions::kEveryRoot) {
    roots.resize(options.has_root() ? static_cast<size_t>(ranks) : 1);
    std::iota(roots.begin(), roots.end(), 0);
  }
  std::vector<CollectivePoint> points;
  for (const DataType type : options.types) {
    for (const ReduceOp op : options.ops) {
      if (options.reduces() && !combines(type, op)) continue;
      for (const int root : roots) {
        for (const size_t bytes : sizes) {
          points.push_back(point_of(options.collective, bytes, ranks, type, op));
          points.back().root = root;
        }
      }
    }
  }
  return points;
}

Bandwidth bandwidth_of(Measured collective, size_t bytes, int ranks, double seconds) {
  if (seconds <= 0) return {};
  const double n = ranks;
  double rate = static_cast<double>(bytes) / 1e9 / seconds;
  double factor = 1;
  if (collective == Measured::kAllReduce) factor = 2 * (n - 1) / n;
  if (collective == Measured::kHypercube) {
    rate *= (n - 1) / n;  // nccl-tests counts what moves in both columns
  } else if (wide_input(collective) || wide_output(collective)) {
    factor = (n - 1) / n;
  }
  return {.algorithm = rate, .bus = rate * factor};
}

IterationStats IterationStats::of(std::vector<double> samples) {
  IterationStats stats;
  if (samples.empty()) return stats;
  std::sort(samples.begin(), samples.end());
  stats.min = samples.front();
  stats.max = samples.back();
  stats.mean = std::accumulate(samples.begin(), samples.end(), 0.0) / samples.size();
  double squares = 0;
  for (const double sample : samples) squares += (sample - stats.mean) * (sample - stats.mean);
  stats.deviation = std::sqrt(squares / samples.size());
  stats.p50 = base::quantile(samples, 0.5);
  stats.p95 = base::quantile(samples, 0.95);
  stats.p99 = base::quantile(samples, 0.99);
  return stats;
}

std::string nccl_name(DataType type) {
  static constexpr std::array<const char*, kDataTypes> kNames = {
      "float", "half",   "bfloat16", "double", "int8",   "uint8", "int32",
      "int64", "f8e4m3", "f8e5m2",   "uint32", "uint64", "bool"};
  return kNames[static_cast<size_t>(type)];
}

std::string redop_name(const CollectivePerfOptions& options, ReduceOp op) {
  if (!options.reduces()) return "none";
  return op == ReduceOp::kPreMulSum ? "mulsum" : std::string(name_of(op));  // theirs fits
}

std::string fit(double value, int width) {
  const size_t most = static_cast<size_t>(width);
  for (const std::string& text :
       {absl::StrFormat("%*.2f", width, value), absl::StrFormat("%*.1f", width, value),
        absl::StrFormat("%*.0f", width, value)}) {
    if (text.size() <= most) return text;
  }
  return width >= 7 ? absl::StrFormat("%*.1e", width, value)
                    : absl::StrFormat("%*.0e", width, value);
}

std::string table_header(const CollectivePerfOptions& options) {
  const char* time = options.cpu_time ? "cputime" : "time";
  const std::string start = absl::StrFormat("# %10s  %12s  %8s  %6s  %6s", "", "", "", "", "");
  const std::string stamp = options.timestamps ? absl::StrFormat(" %19s", "timestamp") : " ";
  const std::string stamp_format =
      options.timestamps ? absl::StrFormat(" %19s", "%Y-%m-%d %H:%M:%S") : " ";
  std::string names, units;
  for (int half = 0; half < 2; ++half) {
    absl::StrAppend(&names,
                    absl::StrFormat("  %7s  %6s  %6s  %6s", time, "algbw", "busbw", "#wrong"));
    absl::StrAppend(&units,
                    absl::StrFormat("  %7s  %6s  %6s  %6s", "(us)", "(GB/s)", "(GB/s)", ""));
    if (!options.per_iteration) continue;
    absl::StrAppend(&names,
                    absl::StrFormat("  %7s  %7s  %7s  %7s", "i_min", "i_max", "i_p99", "i_cv%"));
    absl::StrAppend(&units, absl::StrFormat("  %7s  %7s  %7s  %7s", "(us)", "(us)", "(us)", "(%)"));
  }
  const char* halves =
      options.per_iteration
          ? "              out-of-place (+ per-iteration)                                "
            "in-place (+ per-iteration)\n"
          : "           out-of-place                       in-place          \n";
  return absl::StrCat(
      "#\n", start, halves,
      absl::StrFormat("# %10s  %12s  %8s  %6s  %6s", "size", "count", "type", "redop", "root"),
      names, stamp, "\n",
      absl::StrFormat("# %10s  %12s  %8s  %6s  %6s", "(B)", "(elements)", "", "", ""), units,
      stamp_format, "\n");
}

std::string table_row(const CollectivePerfOptions& options, const PerfRow& row,
                      const std::string& timestamp) {
  const CollectivePoint& point = row.point;
  std::string line =
      absl::StrFormat("%12d  %12d  %8s  %6s  %6d", point.bytes, point.count, nccl_name(point.type),
                      redop_name(options, point.op), options.has_root() ? point.root : -1);
  for (const std::optional<PerfHalf>& half : row.halves) {
    if (!half) {
      absl::StrAppend(&line, absl::StrFormat("  %7s  %6s  %6s  %6s", "N/A", "N/A", "N/A", "N/A"));
      if (options.per_iteration) {
        absl::StrAppend(&line, absl::StrFormat("  %7s  %7s  %7s  %7s", "N/A", "N/A", "N/A", "N/A"));
      }
      continue;
    }
    absl::StrAppend(&line, "  ", fit(half->us, 7), "  ", fit(half->bandwidth.algorithm, 6), "  ",
                    fit(half->bandwidth.bus, 6));
    if (half->wrong) {
      absl::StrAppend(&line, absl::StrFormat("  %6g", *half->wrong));
    } else {
      absl::StrAppend(&line, "    N/A");
    }
    if (options.per_iteration) {
      std::vector<double> samples = half->slowest_us;
      samples.erase(samples.begin(),
                    samples.begin() + std::min<size_t>(samples.size(), options.per_iteration_skip));
      const IterationStats stats = IterationStats::of(std::move(samples));
      for (const double value : {stats.min, stats.max, stats.p99, stats.variation_percent()}) {
        absl::StrAppend(&line, "  ", fit(value, 7));
      }
    }
  }
  if (options.timestamps) absl::StrAppend(&line, absl::StrFormat("%21s", timestamp));
  return line + "\n";
}

bool footer_fails(double wrong, double average_bus, std::optional<double> least_bus) {
  return wrong > 0 || (least_bus && average_bus < 0.9 * *least_bus);
}

std::string table_footer(const CollectivePerfOptions& options, double wrong, double average_bus,
                         std::optional<double> least_bus) {
  const char* bus = !least_bus ? "" : footer_fails(0, average_bus, least_bus) ? "FAILED" : "OK";
  return absl::StrFormat("# %-20s : %.0f %s\n# %-20s : %g %s\n#\n# Collective test concluded: %s\n",
                         "Out of bounds values", wrong, wrong > 0 ? "FAILED" : "OK",
                         "Avg bus bandwidth", average_bus, bus, options.command);
}

namespace {

constexpr int kNcclVersion = 3;  // of its JSON

// nccl-tests writes truth as text.
const char* word(bool truth) { return truth ? "true" : "false"; }

Json nccl_half(const std::optional<PerfHalf>& half, bool cpu_time) {
  if (!half) return nullptr;
  return {{cpu_time ? "cpu_time" : "time", half->us},
          {"alg_bw", half->bandwidth.algorithm},
          {"bus_bw", half->bandwidth.bus},
          {"nwrong", half->wrong ? Json(*half->wrong) : Json(nullptr)}};
}

Json nccl_iterations(const PerfHalf& half, int skipped) {
  const std::vector<double>& all = half.slowest_us;
  const IterationStats stats = IterationStats::of({all.begin() + skipped, all.end()});
  return {{"skipped_iterations", skipped},
          {"min_us", stats.min},
          {"max_us", stats.max},
          {"avg_us", stats.mean},
          {"p50_us", stats.p50},
          {"p95_us", stats.p95},
          {"p99_us", stats.p99},
          {"stdev_us", stats.deviation},
          {"cv_pct", stats.variation_percent()},
          {"times_us", all}};
}

}  // namespace

std::vector<Json> house_rows(const CollectivePerfOptions& options, int ranks,
                             const std::string& route, const PerfRow& row) {
  std::vector<Json> out;
  for (size_t i = 0; i < row.halves.size(); ++i) {
    if (!row.halves[i]) continue;
    const PerfHalf& half = *row.halves[i];
    Row own{.bench = options.command, .route = route, .latency_us = Latency::of(half.average_us)};
    own.params = {
        {"ranks", ranks},
        {"type", std::string(name_of(row.point.type))},
        {"op", redop_name(options, row.point.op)},
        {"count", row.point.count},
        {"in_place", i == 1},
        {"iterations", options.iterations},
        {"in_flight", options.aggregated},
        {"algorithm",
         options.call.algorithm ? std::string(name_of(*options.call.algorithm)) : "chosen"},
        {"ordered", options.call.ordered.value_or(false)}};
    if (options.has_root()) own.params["root"] = row.point.root;
    if (options.call.channels > 0) own.params["channels"] = options.call.channels;
    if (options.call.chunk_bytes > 0) own.params["chunk"] = options.call.chunk_bytes;
    if (!options.link.empty()) own.params["link"] = options.link;
    for (const auto& [key, value] : options.settings) own.params[key] = value;
    if (options.plain_memory) own.params["malloc"] = true;
    if (options.window) own.params["window"] = true;
    own.params["memory_kind"] = memory_kind(options.cuda);
    own.params["path"] = options.cuda ? "staged" : "direct";
    if (options.cpu_time) own.params["time"] = "cpu";
    if (half.wrong) own.verified = *half.wrong == 0;
    Json json = own.to_json();
    json["bytes"] = row.point.bytes;
    json["seconds"] = half.us * 1e-6;
    json["GB_per_s"] = half.bandwidth.algorithm;
    json["bus_GB_per_s"] = half.bandwidth.bus;
    if (half.wrong) json["wrong"] = *half.wrong;
    out.push_back(std::move(json));
  }
  return out;
}

Json nccl_result(const CollectivePerfOptions& options, const PerfRow& row) {
  Json json = {{"size", row.point.bytes},
               {"count", row.point.count},
               {"type", nccl_name(row.point.type)},
               {"redop", redop_name(options, row.point.op)},
               {"root", absl::StrFormat("%6d", options.has_root() ? row.point.root : -1)}};
  constexpr std::array kKeys = {"out_of_place", "in_place"};
  for (size_t i = 0; i < row.halves.size(); ++i) {
    json[kKeys[i]] = nccl_half(row.halves[i], options.cpu_time);
    if (options.per_iteration && row.halves[i]) {
      json[absl::StrCat(kKeys[i], "_per_iter")] =
          nccl_iterations(*row.halves[i], options.per_iteration_skip);
    }
  }
  json["actual_iterations"] = options.iterations;
  json["experiment_name"] = options.command;
  return json;
}

Json nccl_json(const CollectivePerfOptions& options, const NcclDocument& document) {
  Json config = {{"nthreads", 1},
                 {"ngpus", 1},
                 {"minimum_bytes", options.min_bytes},
                 {"maximum_bytes", options.max_bytes}};
  if (options.step_factor > 1) {
    config["step_factor"] = options.step_factor;
  } else {
    config["step_bytes"] = options.step_bytes;
  }
  config["warmup_iters"] = options.warmup;
  config["iterations"] = options.iterations;
  config["aggregated_iterations"] = options.aggregated;
  config["validation"] = options.checks;
  config["graph"] = 0;
  config["blocking_collectives"] = word(options.blocking != 0);
  config["per_iter_timing"] = word(options.per_iteration);
  config["per_iter_skip"] = options.per_iteration_skip;
  config["parallel_init"] = word(true);
  config["devices"] = Json::array();
  for (const RankInfo& rank : document.ranks) {
    config["devices"].push_back({{"rank", rank.rank},
                                 {"group", 0},
                                 {"pid", rank.pid},
                                 {"hostname", rank.host},
                                 {"device", rank.rank},
                                 {"device_hex", ""},
                                 {"device_info", rank.device}});
  }
  const bool slow = footer_fails(0, document.average_bus, document.least_bus);
  return {{"version", kNcclVersion},
          {"start_time", document.start_time},
          {"args", document.arguments},
          {"env", document.environment},
          {"nccl_version", 0},
          {"config", std::move(config)},
          {"results", document.results},
          {"out_of_bounds",
           {{"count", document.wrong}, {"okay", word(document.wrong == 0 && document.whole)}}},
          {"average_bus_bandwidth",
           {{"bandwidth", document.average_bus},
            {"okay", document.least_bus ? word(!slow) : "unchecked"}}},
          {"end_time", document.end_time}};
}

absl::StatusOr<std::string> write_new_file(const std::string& path, const Json& json) {
  std::string name = path;
  std::error_code error;
  for (int i = 0; engine::is_replaced(name) && std::filesystem::exists(name, error); ++i) {
    name = absl::StrCat(path, ".", i);
  }
  if (absl::Status status = write_text(name, dump(json, 1) + "\n", "-J"); !status.ok()) {
    return status;
  }
  return name;
}

}  // namespace baton::bench
