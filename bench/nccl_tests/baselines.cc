// Running Open MPI and the one-copy loop, and setting their times beside ours.
#include "bench/nccl_tests/baselines.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/baselines/floors.h"
#include "bench/report/child_process.h"
#include "bench/report/report.h"

namespace baton::bench {
namespace {

// A program that prints a line per count.
struct Program {
  std::string name;
  std::vector<std::string> argv;
};

bool in_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  const std::vector<std::string> folders = absl::StrSplit(path == nullptr ? "" : path, ':');
  for (const std::string& folder : folders) {
    std::error_code error;
    if (std::filesystem::exists(std::filesystem::path(folder) / program, error)) return true;
  }
  return false;
}

constexpr const char* kInstall = "`./run install-deps all`, then build again";

class Runner {
 public:
  Runner(const CollectivePerfOptions& options, int ranks, DataType type, ReduceOp op,
         const std::vector<size_t>& counts)
      : options_(options), ranks_(ranks), type_(type), op_(op), counts_(counts) {}

  BaselineReport run() {
    const bool shm = options_.provider.empty() || options_.provider == "shm";
    const bool tcp = options_.provider.empty() || options_.provider == "tcp";
    if (!options_.link.empty()) {
      report_.missing.emplace_back(
          "baselines cannot simulate a link: leave out --link or --baselines");
      return std::move(report_);
    }
    if (is_composed(options_.collective)) {
      report_.missing.push_back(
          absl::StrCat("no baseline has ", std::string(name_of(options_.collective))));
      return std::move(report_);
    }
    if (options_.cuda) {
      report_.missing.emplace_back("no baseline has memory of devices");
      return std::move(report_);
    }
    if (shm) one_copy();
    mpi(shm, tcp);
    return std::move(report_);
  }

 private:
  void one_copy() {
    if (ranks_ != 2 || options_.collective != Measured::kAllReduce || type_ != DataType::kF32 ||
        op_ != ReduceOp::kSum) {
      return;  // it is that loop and no other
    }
    BaselineResult result{.name = "one_copy_loop"};
    for (const size_t count : counts_) {
      const auto us = one_copy_loop(count * sizeof(float), options_.iterations, options_.warmup);
      if (!us.ok()) return report_.missing.push_back(std::string(us.status().message()));
      result.median_us.push_back(base::median(*us));
    }
    report_.baselines.push_back(std::move(result));
  }

  void mpi(bool shm, bool tcp) {
    const auto program = baseline_program("mpi_baseline");
    if (!std::filesystem::exists(program) || !in_path("mpirun")) {
      return report_.missing.push_back(absl::StrCat("no Open MPI: ", kInstall));
    }
    if (is_float(type_) && size_of(type_) < sizeof(float)) {
      report_.missing.emplace_back("Open MPI has no floats of 8 and 16 bits");
      return;
    }
    const bool logical = op_ >= ReduceOp::kAnd;
    if (options_.reduces() && (op_ == ReduceOp::kAvg || op_ == ReduceOp::kPreMulSum ||
                               (type_ == DataType::kBool && !logical))) {
      report_.missing.push_back(absl::StrCat("Open MPI has no ", std::string(name_of(op_)), " of ",
                                             std::string(name_of(type_))));
      return;
    }
    const bool binds = options_.pin && static_cast<size_t>(ranks_) <= allowed_cpus().size();
    for (const bool over_tcp : {false, true}) {
      if (over_tcp ? !tcp : !shm) continue;
      std::vector<std::string> argv = mpirun(ranks_, over_tcp, binds, program);
      add_job(argv);
      run_program({over_tcp ? "open_mpi_tcp" : "open_mpi_shm", std::move(argv)});
    }
  }

  void add_job(std::vector<std::string>& argv) const {
    argv.insert(argv.end(), {std::string(name_of(options_.collective)), std::string(name_of(type_)),
                             std::string(name_of(op_)), absl::StrCat(std::max(0, options_.root)),
                             absl::StrCat(options_.iterations), absl::StrCat(options_.warmup)});
    for (const size_t count : counts_) argv.push_back(absl::StrCat(count));
  }

  void run_program(const Program& program) {
    const auto output = output_of(-1, program.argv, {}, std::chrono::minutes(10));
    if (!output.ok()) {
      return report_.missing.push_back(
          absl::StrCat(program.name, " failed: ", std::string(output.status().message())));
    }
    BaselineResult result{.name = program.name,
                          .median_us = std::vector<double>(counts_.size(), 0)};
    const std::vector<std::string> lines = absl::StrSplit(*output, '\n', absl::SkipEmpty());
    for (const std::string& line : lines) {
      const Json json = Json::parse(line, nullptr, false);
      if (json.is_object() && json.contains("missing")) {
        return report_.missing.push_back(json["missing"].get<std::string>());
      }
      if (!json.is_object() || !json.contains("count") || !json.contains("us")) continue;
      for (size_t i = 0; i < counts_.size(); ++i) {
        if (json["count"] == counts_[i]) result.median_us[i] = json["us"].value("p50", 0.0);
      }
    }
    report_.baselines.push_back(std::move(result));
  }

  const CollectivePerfOptions& options_;
  const int ranks_;
  const DataType type_;
  const ReduceOp op_;
  const std::vector<size_t>& counts_;
  BaselineReport report_;
};

}  // namespace

BaselineReport run_baselines(const CollectivePerfOptions& options, int ranks, DataType type,
                             ReduceOp op, const std::vector<size_t>& counts) {
  return Runner(options, ranks, type, op, counts).run();
}

std::string join_baselines(const BaselineReport& report, const std::vector<size_t>& counts,
                           std::vector<Json>& rows) {
  std::vector<std::string> heads = {"#", "size", "count", "baton us"};
  for (const BaselineResult& baseline : report.baselines) {
    heads.push_back(baseline.name);
    heads.emplace_back("ratio");
  }
  Table table(std::move(heads));
  for (size_t i = 0; i < counts.size(); ++i) {
    for (Json& row : rows) {
      if (row["params"]["count"] != counts[i] || row["params"]["in_place"] == true) continue;
      const double ours = row["latency_us"]["p50"];
      const double bytes = row["bytes"];
      std::vector<std::string> cells = {"#", absl::StrFormat("%.0f", bytes),
                                        absl::StrCat(counts[i]), absl::StrFormat("%.2f", ours)};
      Json list = Json::array();
      for (const BaselineResult& baseline : report.baselines) {
        const double us = baseline.median_us[i];
        const double ratio = ours > 0 ? us / ours : 0;
        cells.push_back(us > 0 ? absl::StrFormat("%.2f", us) : "-");
        cells.push_back(us > 0 ? absl::StrFormat("%.2fx", ratio) : "-");
        if (us <= 0) continue;
        const double gb_per_s = bytes / us * 1e-3;
        if (baseline.name == "one_copy_loop") {
          row["floor"] = {{"name", baseline.name}, {"GB_per_s", gb_per_s}, {"p50_us", us}};
          row["ratio_to_floor"] = ratio;
        } else {
          list.push_back(
              {{"name", baseline.name}, {"GB_per_s", gb_per_s}, {"p50_us", us}, {"ratio", ratio}});
        }
      }
      if (!list.empty()) row["rivals"] = std::move(list);
      table.add(std::move(cells));
      break;
    }
  }
  std::string text;
  if (!report.baselines.empty()) {
    text = absl::StrCat(
        "#\n# Medians in us, out of place, and how much longer the others took (above 1: Baton is "
        "faster)\n",
        table.text());
  }
  for (const std::string& why : report.missing) absl::StrAppend(&text, "# ", why, "\n");
  return text;
}

}  // namespace baton::bench
