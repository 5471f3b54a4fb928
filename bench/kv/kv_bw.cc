// `baton kv_bw`: the measurement and what is printed of it.
#include "bench/kv/kv_bw.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kv/floors.h"
#include "bench/kv/kv_session.h"

namespace baton::bench {
namespace {

constexpr size_t kRounds = 15;          // in which transfers and floor take turns
constexpr double kWarmUpSeconds = 0.1;  // and at least two transfers

// Transfers in a round, from how long one takes.
size_t round_size(const KvBwOptions& options, double seconds_each) {
  if (options.transfers > 0) return std::max<size_t>(1, options.transfers / kRounds);
  const double fit = options.seconds / static_cast<double>(kRounds) / std::max(seconds_each, 1e-7);
  return static_cast<size_t>(std::clamp(std::round(fit), 1.0, 1e6));
}

// The bytes that the floor copies per round: as many as the transfers move, but no more than take
// the same time. Compared with a device's copies a CPU would need a hundred times longer.
absl::StatusOr<size_t> floor_size(const Floor& floor, double bytes, size_t count, double seconds) {
  const auto rate = floor.run(1);
  if (!rate.ok()) return rate.status();
  const double fit = seconds * static_cast<double>(count) * *rate * 1e9 / bytes;
  return static_cast<size_t>(std::clamp(fit, 1.0, static_cast<double>(count)));
}

absl::StatusOr<Floor> floor_of(const KvBwOptions& options, KvSession& session, Cores cores) {
  if (options.provider == "shm" && options.cuda) return device_floor(session, *options.cuda);
  if (options.provider == "shm") return memcpy_floor(session);
  if (options.provider == "tcp" && options.host.empty()) {
    return sockets_floor(options, session.workload().bytes(), cores, session.route());
  }
  if (options.provider == "ucx" && options.host.empty()) {  // one connection, as Linux has them
    return sockets_floor(options, session.workload().bytes(), cores, "(cubic, 1 socket)");
  }
  return Floor();
}

absl::StatusOr<Row> measure(const KvBwOptions& options, Op op, KvSession& session, Cores cores) {
  if (absl::Status status = session.prepare(op, options.workload); !status.ok()) return status;
  auto floor = floor_of(options, session, cores);
  if (!floor.ok()) return floor.status();

  // A short warm-up, which also tells how long a transfer takes.
  double seconds_each = 0;
  for (double spent = 0; spent < std::min(kWarmUpSeconds, options.seconds);) {
    const auto took = session.run(2 * options.inflight, options.inflight);
    if (!took.ok()) return took.status();
    seconds_each = *took / static_cast<double>(2 * options.inflight);
    spent += *took;
    if (options.transfers > 0) break;
  }
  const size_t count = std::max(round_size(options, seconds_each), options.inflight);
  const size_t rounds =
      options.transfers > 0
          ? std::clamp<size_t>(options.transfers / count, 1, kRounds)
          : std::clamp<size_t>(static_cast<size_t>(options.seconds / seconds_each), 1, kRounds);
  session.forget_times();

  const double bytes = static_cast<double>(session.workload().bytes());
  size_t floor_count = 0;
  if (floor->run) {
    const auto size = floor_size(*floor, bytes, count, seconds_each);
    if (!size.ok()) return size.status();
    floor_count = *size;
  }
  std::vector<double> rates, floor_rates;
  for (size_t round = 0; round < rounds; ++round) {
    const auto took = session.run(count, options.inflight);
    if (!took.ok()) return took.status();
    rates.push_back(bytes * static_cast<double>(count) * 1e-9 / *took);
    if (!floor->run) continue;
    const auto rate = floor->run(floor_count);
    if (!rate.ok()) return rate.status();
    floor_rates.push_back(*rate);
  }

  Row row;
  row.bench = "kv_bw";
  row.params = options.workload.to_json();
  row.params["provider"] = options.provider;
  row.params["op"] = name_of(op);
  row.params["inflight"] = options.inflight;
  row.params["pinned"] = cores.initiator >= 0;
  row.params["memory"] = session.backing();
  row.params["memory_kind"] = memory_kind(options.cuda);
  row.params["path"] = session.worker().stats().staged_transfers > 0 ? "staged" : "direct";
  for (const auto& [key, value] : options.settings) row.params[key] = value;
  row.route = session.route();
  row.bytes = session.workload().bytes();
  row.pieces = session.workload().pieces();
  row.gb_per_s = Rate::of(rates);
  row.seconds = bytes * 1e-9 / row.gb_per_s.median;
  row.latency_us = Latency::of(session.latencies());
  row.submit_us = base::median(session.submits());
  if (floor->run) {
    row.floor = floor->reference;
    row.floor->gb_per_s = base::median(floor_rates);
  }
  if (absl::Status status = session.verify(); !status.ok()) return status;
  row.verified = true;
  return row;
}

absl::Status listen(const KvBwOptions& options) {
  WorkerOptions worker_options;
  worker_options.name = "kv_bw-target";
  worker_options.listen_host = options.listen_host;
  worker_options.listen_port = options.listen_port;
  worker_options.advertise = options.advertise;
  // Others are there anyway; tcp answers host:port.
  if (!why_on_request(options.provider).empty()) {
    worker_options.providers = {options.provider, "tcp"};
  }
  worker_options.settings = options.settings;
  if (absl::Status there = device_is_there(options.cuda); !there.ok()) return there;
  if (const Cores cores = choose_cores(options); cores.target >= 0) pin_to(cores.target);
  const auto worker = Worker::create(std::move(worker_options));
  if (!worker.ok()) return worker.status();
  std::cout
      << absl::StrFormat(
             "listening on %s:%d: run `baton kv_bw HOST:%d` on the other side; Ctrl-C ends it",
             options.listen_host.empty() ? "127.0.0.1" : options.listen_host, (*worker)->port(),
             (*worker)->port())
      << std::endl;
  return serve_kv_target(
      **worker, {.once = options.once, .device = options.cuda, .say = [](const std::string& line) {
                   std::cout << line << std::endl;
                 }});
}

std::string times(double ratio) { return absl::StrFormat("%.*f", ratio < 10 ? 2 : 1, ratio); }

}  // namespace

absl::StatusOr<std::vector<Row>> measure_kv_bw(const KvBwOptions& options) {
  const Cores cores = choose_cores(options);
  const auto session = KvSession::open(options, cores);
  if (!session.ok()) return session.status();
  std::vector<Row> rows;
  for (const Op op : options.ops) {
    auto row = measure(options, op, **session, cores);
    if (!row.ok()) return row.status();
    rows.push_back(*std::move(row));
  }
  const bool sockets = options.provider == "tcp" || options.provider == "ucx";
  if (options.baselines && sockets && options.host.empty()) {
    for (Row& row : rows) {
      const Op op = row.params["op"] == "read" ? Op::kRead : Op::kWrite;
      auto baseline = ucx_baseline(op, row.bytes / row.pieces, cores);
      if (baseline.ok()) {
        row.baselines.push_back(*std::move(baseline));
      } else {
        row.params["baselines_skipped"] = std::string(baseline.status().message());
      }
    }
  }
  return rows;
}

std::string kv_bw_table(const std::vector<Row>& rows) {
  Table table({"op", "layout", "pages", "bytes", "GB/s", "min", "max", "pages/s", "p50 us", "p90",
               "p99", "p99.9", "max", "against", "GB/s", "ratio"});
  std::string notes;
  const auto latency = [](double us) { return absl::StrFormat("%.0f", us); };
  const auto gb = [](double rate) { return absl::StrFormat("%.2f", rate); };
  for (const Row& row : rows) {
    const Latency us = row.latency_us.value_or(Latency());
    std::vector<Reference> against = row.baselines;
    if (row.floor) against.insert(against.begin(), *row.floor);
    std::vector<std::string> cells = {row.params.value("op", ""),
                                      row.params.value("layout", ""),
                                      absl::StrCat(row.pieces),
                                      human_bytes(row.bytes / row.pieces),
                                      gb(row.gb_per_s.median),
                                      gb(row.gb_per_s.min),
                                      gb(row.gb_per_s.max),
                                      human_count(row.pieces_per_s()),
                                      latency(us.p50),
                                      latency(us.p90),
                                      latency(us.p99),
                                      latency(us.p999),
                                      latency(us.max)};
    if (against.empty()) table.add(cells);
    for (const Reference& reference : against) {
      cells.resize(13);
      cells.insert(cells.end(),
                   {reference.name, gb(reference.gb_per_s), times(row.ratio_to(reference))});
      table.add(std::exchange(cells, std::vector<std::string>(13)));
    }
    for (const Reference& reference : against) {
      if (!reference.note.empty() && notes.find(reference.note) == std::string::npos) {
        absl::StrAppend(&notes, reference.name, ": ", reference.note, "\n");
      }
    }
    if (row.params.contains("baselines_skipped")) {
      absl::StrAppend(&notes, "no baseline: ", row.params.value("baselines_skipped", ""), "\n");
    }
  }
  if (!rows.empty()) {
    const Row& row = rows.front();
    absl::StrAppend(&notes, "route: ", row.route, "\nmemory: ", row.params.value("memory", ""),
                    row.params.value("pinned", false) ? "; each side pinned to its core" : "",
                    absl::StrFormat("\nsubmit() takes %.1f us, median", row.submit_us),
                    "\nverified: every byte was checked after the timed part\n");
  }
  return table.text() + notes;
}

int kv_bw_main(int argc, char** argv) {
  const KvBwCommand command = parse_kv_bw(argc, argv);
  if (!command.options) return command.exit_status;
  const KvBwOptions& options = *command.options;
  const auto fail = [](const absl::Status& status) {
    std::cerr << "baton kv_bw: " << status.message() << "\n";
    return 1;
  };
  if (options.listen) {
    const absl::Status status = listen(options);
    return status.ok() ? 0 : fail(status);
  }
  const auto rows = measure_kv_bw(options);
  if (!rows.ok()) return fail(rows.status());
  std::cout << kv_bw_table(*rows) << std::flush;
  if (!options.json.empty()) {
    if (absl::Status status = write_json(options.json, *rows); !status.ok()) return fail(status);
  }
  return 0;
}

}  // namespace baton::bench
