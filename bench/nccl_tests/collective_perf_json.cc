// Writes the results of a collective benchmark as JSON.
#include "bench/nccl_tests/collective_perf_table.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/report/bench_memory.h"
#include "engine/files/files.h"

namespace baton::bench {
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
