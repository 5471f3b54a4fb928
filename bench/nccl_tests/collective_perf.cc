// Starts the ranks of a collective benchmark; runs baselines and writes files when they are done.
#include "bench/nccl_tests/collective_perf.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "bench/nccl_tests/baselines.h"
#include "bench/nccl_tests/collective_perf_options.h"
#include "bench/nccl_tests/collective_perf_rank.h"
#include "collectives/launch.h"
#include "transport/base/unique_fd.h"

namespace baton::bench {
namespace {

// Memory in which a forked rank 0 leaves its results for this process.
class Mailbox {
 public:
  Mailbox() : fd_(memfd_create("baton-perf-results", MFD_CLOEXEC)) {}

  void put(const PerfResults& results) const {
    const Json both = {{"rows", results.rows}, {"nccl", results.nccl_json}};
    const std::string text = both.dump(-1, ' ', false, Json::error_handler_t::replace);
    for (size_t done = 0; done < text.size();) {
      const ssize_t wrote =
          pwrite(fd_.get(), text.data() + done, text.size() - done, static_cast<off_t>(done));
      if (wrote <= 0) return;  // an incomplete text does not parse
      done += static_cast<size_t>(wrote);
    }
  }

  PerfResults take() const {
    std::string text(static_cast<size_t>(std::max<off_t>(0, lseek(fd_.get(), 0, SEEK_END))), '\0');
    const ssize_t got = pread(fd_.get(), text.data(), text.size(), 0);
    const Json both = Json::parse(text, nullptr, false);
    PerfResults results;
    if (got < 0 || !both.is_object()) return results;
    results.rows = both["rows"].get<std::vector<Json>>();
    results.nccl_json = both["nccl"];
    return results;
  }

 private:
  base::UniqueFd fd_;
};

int complain(const CollectivePerfOptions& options, const absl::Status& status) {
  std::cerr << "baton " << options.command << ": " << std::string(status.message()) << "\n";
  return 1;
}

void add_baselines(const CollectivePerfOptions& options, int ranks, std::vector<Json>& rows) {
  for (const DataType type : options.types) {
    for (const ReduceOp op : options.ops) {
      // The rows of this type and operation, and their counts.
      std::vector<Json> mine;
      std::vector<size_t> counts, places;
      for (size_t i = 0; i < rows.size(); ++i) {
        const Json& params = rows[i]["params"];
        if (params["type"] != std::string(name_of(type)) ||
            params["op"] != redop_name(options, op) || params["in_place"] == true) {
          continue;
        }
        const size_t count = params["count"];
        if (std::find(counts.begin(), counts.end(), count) != counts.end()) continue;
        counts.push_back(count);
        places.push_back(i);
        mine.push_back(rows[i]);
      }
      if (counts.empty()) continue;
      const BaselineReport report = run_baselines(options, ranks, type, op, counts);
      std::cout << join_baselines(report, counts, mine) << std::flush;
      for (size_t i = 0; i < places.size(); ++i) rows[places[i]] = std::move(mine[i]);
    }
  }
}

// 0, or 1 if a file could not be written.
int write_files(const CollectivePerfOptions& options, const PerfResults& results) {
  int status = 0;
  if (!options.json.empty()) {
    const absl::Status written = write_lines(options.json, results.rows);
    if (!written.ok()) status = complain(options, written);
  }
  if (!options.nccl_json.empty()) {
    const auto name = write_new_file(options.nccl_json, results.nccl_json);
    if (!name.ok()) return complain(options, name.status());
    std::cout << "# Wrote JSON output to " << *name << "\n";
  }
  return status;
}

}  // namespace

int collective_perf_main(int argc, char** argv) {
  const CollectivePerfCommand command = parse_collective_perf(argc, argv);
  if (!command.options) return command.exit_status;
  const CollectivePerfOptions& options = *command.options;
  const std::vector<std::string> arguments(argv, argv + argc);

  const auto place = launch::place_for(options.one_each ? 0 : options.ranks);
  if (!place.ok()) return complain(options, place.status());
  if (place->has_value()) {
    PerfResults results;
    int status = run_perf_rank(options, arguments, **place, results);
    if ((*place)->rank != 0) return status;
    if (options.baselines)
      std::cout << "# --baselines needs --ranks: the launcher's ranks occupy the cores\n";
    const int files = write_files(options, results);
    return status != 0 ? status : files;
  }

  const int ranks = options.ranks > 0 ? options.ranks : 2;
  const Mailbox mailbox;
  const auto ended =
      launch::fork_ranks({.ranks = ranks}, [&](const launch::Place& mine, int /*generation*/) {
        PerfResults results;
        const int status = run_perf_rank(options, arguments, mine, results);
        if (mine.rank == 0) mailbox.put(results);
        return status;
      });
  if (!ended.ok()) return complain(options, ended.status());
  PerfResults results = mailbox.take();
  if (options.baselines && *ended == 0) add_baselines(options, ranks, results.rows);
  const int files = write_files(options, results);
  return *ended != 0 ? *ended : files;
}

}  // namespace baton::bench
