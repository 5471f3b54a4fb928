// `baton kv_bw --suite`: its cases, the two measurements that are not bandwidth, and the table.

#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kv/kv_bw.h"
#include "bench/kv/kv_session.h"
#include "bench/report/fast_clock.h"
#include "transport/progress_thread.h"

namespace baton::bench {
namespace {

constexpr size_t kSubmitPages = 32000;
constexpr double kSubmitTargetUs = 50;
constexpr double kIdleTargetPercent = 1;
constexpr Time kIdleTime = std::chrono::seconds(3);

// One measurement: the baseline for its row, and how the table shows it.
struct Case {
  const char* provider;
  std::vector<Op> ops;
  WorkloadSpec workload;
  bool baselines = false;
  double least_ratio =
      0;  // to the floor, or to the baseline where there are baselines; 0: no target
  double least_pages_s = 0;  // instead
};

WorkloadSpec pages(size_t count, size_t bytes, bool scattered) {
  return {.pages = count, .page_bytes = bytes, .scattered = scattered};
}

std::vector<Case> cases() {
  constexpr size_t kKiB = 1 << 10;
  constexpr size_t kMiB = 1 << 20;
  const std::vector<Op> both = {Op::kWrite, Op::kRead};
  return {
      {"shm", {Op::kWrite}, pages(1, 64 * kMiB, false), false, 0.85, 0},
      {"shm", both, pages(4096, 16 * kKiB, true), false, 0.80, 0},
      {"shm", {Op::kWrite}, pages(32768, kKiB, true), false, 0, 2.5e6},
      {"tcp", both, pages(1, 256 * kMiB, false), false, 0.90, 0},
      {"tcp", {Op::kRead}, pages(4096, 16 * kKiB, true), true, 3, 0},
  };
}

// One line of the table.
std::vector<std::string> line(const std::string& name, const std::string& reached,
                              const std::string& against, const std::string& ratio,
                              const std::string& target, bool met) {
  return {name, reached, against, ratio, target, met ? "met" : "MISSED"};
}

void add_case(Table& table, const Case& one, const Row& row) {
  const std::string name = absl::StrCat(
      one.provider, " ", row.params.value("op", ""), ", ",
      one.workload.scattered ? absl::StrCat(row.pieces, " x ", human_bytes(row.bytes / row.pieces))
                             : human_bytes(row.bytes));
  const std::string reached = absl::StrFormat("%.2f GB/s", row.gb_per_s.median);
  const auto against = [](const Reference& reference) {
    return absl::StrFormat("%s %.2f", reference.name, reference.gb_per_s);
  };
  const auto ratio = [](double value) { return absl::StrFormat("%.2f", value); };
  if (row.floor) {
    const bool target = one.least_ratio > 0 && !one.baselines;
    const double reached_ratio = row.ratio_to_floor();
    table.add(line(name, reached, against(*row.floor), ratio(reached_ratio),
                   target ? absl::StrFormat(">= %.2f", one.least_ratio) : "",
                   reached_ratio >= one.least_ratio));
    if (!target) table.back().back() = "";
  }
  for (const Reference& baseline : row.baselines) {
    table.add(line(name, reached, against(baseline), ratio(row.ratio_to(baseline)),
                   absl::StrFormat(">= %.2f", one.least_ratio),
                   row.ratio_to(baseline) >= one.least_ratio));
  }
  if (one.baselines && row.baselines.empty()) {
    table.add(
        {name, reached, row.params.value("baselines_skipped", "no baseline"), "", "", "skipped"});
  }
  if (one.least_pages_s > 0) {
    table.add(line(name, human_count(row.pieces_per_s()) + " pages/s", "", "",
                   ">= " + human_count(one.least_pages_s),
                   row.pieces_per_s() >= one.least_pages_s));
  }
}

// Brings the page lists of a request into the cache, where they are when an engine has just made
// them.
void touch_lists(const TransferRequest& request) {
  for (const Layout* layout : {&request.local_layout, &request.remote_layout}) {
    for (const Dim& dim : layout->dims()) {
      if (dim.index == nullptr) continue;
      [[maybe_unused]] volatile uint32_t sum =
          std::accumulate(dim.index, dim.index + dim.count, 0u);
    }
  }
}

// How long submit() takes for many pages; the worker moves them between two calls, which drives the
// page lists out of the core's own cache unless `fresh` brings them back.
absl::StatusOr<Row> measure_submit(const KvBwOptions& options, Cores cores, bool fresh) {
  const auto session = KvSession::open(options, cores);
  if (!session.ok()) return session.status();
  const WorkloadSpec spec = pages(kSubmitPages, 1 << 10, true);
  absl::Status status = (*session)->prepare(Op::kWrite, spec);
  Worker& worker = (*session)->worker();
  std::vector<double> microseconds;
  for (int i = 0; i < 220 && status.ok(); ++i) {
    if (fresh) touch_lists((*session)->request());
    const Time begin = Clock::steady().now();
    const auto id = worker.submit((*session)->request());
    const Time end = Clock::steady().now();
    if (!id.ok()) return id.status();
    if (i >= 20) {
      microseconds.push_back(std::chrono::duration<double, std::micro>(end - begin).count());
    }
    status = worker.wait(*id);
  }
  if (status.ok()) status = (*session)->verify();
  if (!status.ok()) return status;
  Row row;
  row.bench = "submit";
  row.params = spec.to_json();
  row.params["provider"] = options.provider;
  row.params["page_lists"] = fresh ? "in cache" : "out of cache";
  row.route = (*session)->route();
  row.latency_us = Latency::of(std::move(microseconds));
  row.verified = true;
  return row;
}

// The cost of a connected worker that has nothing to do, run by a ProgressThread.
absl::StatusOr<Row> measure_idle(const KvBwOptions& options, Cores cores) {
  const auto session = KvSession::open(options, cores);
  if (!session.ok()) return session.status();
  Worker& worker = (*session)->worker();
  Row row;
  {
    const ProgressThread thread(worker);
    const CpuMeter meter;
    absl::Status waited = worker.wait_until([] { return false; }, kIdleTime);
    if (!absl::IsDeadlineExceeded(waited)) return waited;
    row.cpu_percent = meter.percent();
  }
  row.bench = "idle_worker";
  row.params["provider"] = options.provider;
  row.route = (*session)->route();
  row.seconds = std::chrono::duration<double>(kIdleTime).count();
  return row;
}

}  // namespace

int run_kv_suite(const KvBwOptions& options) {
  Table table({"case", "reached", "against", "ratio", "target", ""});
  std::vector<Row> rows;
  bool good = true;
  const auto failed = [&](const std::string& what, const absl::Status& status) {
    std::cerr << "baton kv_bw: " << what << ": " << status.message() << "\n";
    good = false;
  };

  for (const Case& one : cases()) {
    KvBwOptions run = options;
    run.provider = one.provider;
    run.ops = one.ops;
    run.workload = one.workload;
    run.baselines = one.baselines;
    std::cout << "running: " << one.provider << ", " << one.workload.to_json().dump() << std::endl;
    const auto measured = measure_kv_bw(run);
    if (!measured.ok()) {
      failed(one.provider, measured.status());
      continue;
    }
    for (const Row& row : *measured) add_case(table, one, row);
    if (measured->size() == 2 && std::string(one.provider) == "tcp") {
      const double ratio = (*measured)[1].gb_per_s.median / (*measured)[0].gb_per_s.median;
      table.add(line("tcp read against write", "", "", absl::StrFormat("%.2f", ratio), ">= 0.90",
                     ratio >= 0.9));
    }
    rows.insert(rows.end(), measured->begin(), measured->end());
  }

  const Cores cores = choose_cores(options);
  for (const char* provider : {"shm", "tcp"}) {
    KvBwOptions run = options;
    run.provider = provider;
    std::cout << "running: " << provider << ", small measurements" << std::endl;
    for (const bool fresh : {true, false}) {
      if (run.provider != "shm") break;  // submit() is the same for every provider
      const auto submit = measure_submit(run, cores, fresh);
      if (!submit.ok()) {
        failed("submit()", submit.status());
        continue;
      }
      table.add(line(absl::StrFormat("submit(), %u pages, lists %s cache", kSubmitPages,
                                     fresh ? "in" : "out of"),
                     absl::StrFormat("%.1f us", submit->latency_us->p50), "", "", "< 50 us",
                     submit->latency_us->p50 < kSubmitTargetUs));
      rows.push_back(*submit);
    }
    const auto idle = measure_idle(run, cores);
    if (idle.ok()) {
      table.add(line(absl::StrCat(provider, " idle worker"),
                     absl::StrFormat("%.2f %% of a core", *idle->cpu_percent), "", "", "< 1 %",
                     *idle->cpu_percent < kIdleTargetPercent));
      rows.push_back(*idle);
    } else {
      failed("idle worker", idle.status());
    }
  }

  std::cout << "\n"
            << table.text()
            << "Medians; transfers and floor take turns. GB/s are 10^9 bytes per second.\n"
            << (good ? "verified: every byte of every row was checked\n" : "some rows failed\n");
  if (!options.json.empty()) {
    if (absl::Status status = write_json(options.json, rows); !status.ok()) {
      failed(options.json, status);
    }
  }
  std::cout << std::flush;
  return good ? 0 : 1;
}

}  // namespace baton::bench
