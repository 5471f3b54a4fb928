// One rank of a collective benchmark: makes the communicator, prints header, rows and footer.
#include "bench/nccl_tests/collective_perf_rank.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/report/bench_memory.h"
#include "bench/report/child_process.h"
#include "collectives/communicator.h"
#include "collectives/rendezvous.h"

extern char** environ;  // NOLINT: POSIX names it

namespace baton::bench {
namespace {

std::string now_text() {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::Now(), absl::LocalTimeZone());
}

std::optional<double> least_bus_bandwidth() {
  double least = 0;
  const char* const text = std::getenv("NCCL_TESTS_MIN_BW");
  if (text == nullptr || !absl::SimpleAtod(text, &least)) return std::nullopt;
  return least;
}

// Serves the rendezvous if the launcher of this rank does not.
absl::StatusOr<std::unique_ptr<collectives::RendezvousServer>> serve(const launch::Place& place) {
  if (!place.serves) return nullptr;
  const auto key = ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  return collectives::RendezvousServer::start_at(*key, place.rendezvous,
                                                 static_cast<uint32_t>(place.ranks));
}

absl::StatusOr<std::unique_ptr<Communicator>> join(const CollectivePerfOptions& options,
                                                   const launch::Place& place) {
  CommunicatorOptions group;
  group.rank = place.rank;
  group.ranks = place.ranks;
  group.rendezvous = place.rendezvous;
  group.timeout =
      std::chrono::duration_cast<Time>(std::chrono::duration<double>(options.timeout_s));
  group.worker.name = absl::StrCat("rank ", place.rank);
  if (!options.provider.empty()) {
    group.worker.providers = {options.provider};
    group.worker.require = options.provider;
  }
  group.worker.settings = options.settings;
  if (!options.link.empty()) {
    const auto shape = LinkShape::parse(options.link);
    if (!shape.ok()) return shape.status();
    group.worker.shape = *shape;
  }
  return Communicator::create(std::move(group));
}

// A rank of the header, as it travels.
struct HeaderRank {
  int32_t pid = 0;
  int32_t cpu = -1;
  std::array<char, 120> host{};
};

absl::StatusOr<std::vector<RankInfo>> introduce(Communicator& group, int cpu) {
  HeaderRank mine{.pid = static_cast<int32_t>(getpid()), .cpu = cpu};
  gethostname(mine.host.data(), mine.host.size() - 1);
  std::vector<HeaderRank> all(static_cast<size_t>(group.ranks()));
  const absl::Status status = group.all_gather(&mine, all.data(), sizeof mine, DataType::kU8);
  if (!status.ok()) return status;
  std::vector<RankInfo> ranks;
  for (const HeaderRank& one : all) {
    RankInfo& info = ranks.emplace_back();
    info.rank = static_cast<int>(ranks.size()) - 1;
    info.pid = one.pid;
    info.host = one.host.data();
    info.device = one.cpu < 0 ? "any core" : absl::StrCat("core ", one.cpu);
  }
  return ranks;
}

// Every line behind `mark`.
std::string commented(const std::string& text, const char* mark) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  std::string out;
  for (const std::string& line : lines) absl::StrAppend(&out, mark, line, "\n");
  return out;
}

std::string preamble(const CollectivePerfOptions& options, const std::vector<RankInfo>& ranks,
                     const std::string& routes) {
  const bool factor = options.step_factor > 1;
  std::string text = absl::StrFormat(
      "# Collective test starting: %s\n# nRanks %d minBytes %d maxBytes %d step: %d(%s) warmup "
      "iters: %d iters: %d agg iters: %d validation: %d unalign: %d\n",
      options.command, ranks.size(), options.min_bytes, options.max_bytes,
      factor ? options.step_factor : options.step_bytes, factor ? "factor" : "bytes",
      options.warmup, options.iterations, options.aggregated, options.checks, options.unalign);
  if (options.blocking == 1) absl::StrAppend(&text, "# A barrier after each -m, timed\n");
  if (options.blocking == 3) absl::StrAppend(&text, "# A barrier after each -n, not timed\n");
  absl::StrAppend(&text, "#\n# Using devices\n");
  for (const RankInfo& rank : ranks) {
    absl::StrAppend(&text, absl::StrFormat("#  Rank %2d Group  0 Pid %6d on %10s device %2d %s\n",
                                           rank.rank, rank.pid, rank.host, rank.rank, rank.device));
  }
  absl::StrAppend(&text, "#\n# Routes of rank 0\n", commented(routes, "#  "));
  return text;
}

// From explain(): where calls on device memory combined, and the predicted cost of either way.
std::string sums_of(const std::string& explained, DataType type) {
  const std::string begin = absl::StrCat("sums of ", std::string(name_of(type)), ": ");
  const std::vector<std::string> lines = absl::StrSplit(explained, '\n');
  for (const std::string& line : lines) {
    if (line.compare(0, begin.size(), begin) == 0) return line;
  }
  return "";
}

// The way to the first other rank: "shm" of "rank 1: shm".
std::string route_of(const std::string& routes) {
  const std::string first = routes.substr(0, routes.find('\n'));
  const size_t colon = first.find(": ");
  return colon == std::string::npos ? first : first.substr(colon + 2);
}

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

int complain(const CollectivePerfOptions& options, const launch::Place& place,
             const absl::Status& status) {
  std::fprintf(stderr, "baton %s: rank %d: %s\n", options.command.c_str(), place.rank,
               std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int run_perf_rank(const CollectivePerfOptions& options, const std::vector<std::string>& arguments,
                  const launch::Place& place, PerfResults& results) {
  const std::vector<int>& cpus = allowed_cpus();
  int cpu = -1;
  if (options.pin && static_cast<size_t>(place.local_ranks) <= cpus.size()) {
    cpu = cpus[static_cast<size_t>(place.local_rank)];
    if (!pin_to(cpu)) cpu = -1;
  }
  if (options.collective == Measured::kHypercube && !std::has_single_bit(unsigned(place.ranks))) {
    return complain(options, place,
                    absl::InvalidArgumentError(absl::StrFormat(
                        "a hypercube has 2, 4, 8, ... corners: there are %d ranks", place.ranks)));
  }
  if (options.root >= place.ranks) {
    return complain(options, place,
                    absl::InvalidArgumentError(absl::StrFormat("-r %d: there are ranks 0 to %d",
                                                               options.root, place.ranks - 1)));
  }
  if (absl::Status there = device_is_there(options.cuda); !there.ok()) {
    return complain(options, place, there);
  }
  NcclDocument document{.arguments = arguments, .start_time = now_text()};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    document.environment.emplace_back(*variable);
  }
  document.least_bus = least_bus_bandwidth();

  const auto server = serve(place);
  if (!server.ok()) return complain(options, place, server.status());
  const auto group = join(options, place);
  if (!group.ok()) return complain(options, place, group.status());
  auto ranks = introduce(**group, cpu);
  if (!ranks.ok()) return complain(options, place, ranks.status());
  document.ranks = *std::move(ranks);

  const bool speaks = place.rank == 0;
  const std::string routes = (*group)->routes();
  if (speaks) print(preamble(options, document.ranks, routes) + table_header(options));
  double bus_total = 0;
  size_t halves = 0;
  const absl::Status measured = measure_collectives(options, **group, [&](const PerfRow& row) {
    for (const std::optional<PerfHalf>& half : row.halves) {
      if (!half) continue;
      document.wrong += half->wrong.value_or(0);
      bus_total += half->bandwidth.bus;
      ++halves;
    }
    if (!speaks) return;
    print(table_row(options, row, now_text()));
    const std::string explained =
        (*group)->explain(collective_of(options.collective), row.point.bytes, options.call);
    const std::string sums = sums_of(explained, row.point.type);
    print(commented(options.explain ? explained : sums, "#   "));
    for (Json& json : house_rows(options, place.ranks, route_of(routes), row)) {
      if (!sums.empty()) json["sums"] = sums;
      if (absl::StrContains(sums, "from device to device")) json["params"]["path"] = "direct";
      results.rows.push_back(std::move(json));
    }
    document.results.push_back(nccl_result(options, row));
  });
  document.average_bus = halves > 0 ? bus_total / static_cast<double>(halves) : 0;
  document.end_time = now_text();
  document.whole = measured.ok();
  if (speaks) results.nccl_json = nccl_json(options, document);
  if (!measured.ok()) return complain(options, place, measured);  // and no verdict
  if (speaks) {
    print(table_footer(options, document.wrong, document.average_bus, document.least_bus));
  }
  return footer_fails(document.wrong, document.average_bus, document.least_bus) ? 1 : 0;
}

}  // namespace baton::bench
