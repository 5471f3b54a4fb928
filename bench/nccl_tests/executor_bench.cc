// `baton executor_bench`: one rank's lanes over links that deliver every message at once.
#include "bench/nccl_tests/collective_perf.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/report/report.h"
#include "collectives/executor/executor.h"
#include "engine/command_line/command_line.h"

namespace baton::bench {
namespace {

using collectives::executor::Call;
using collectives::executor::CallTag;
using collectives::executor::Executor;
using collectives::executor::Link;
using collectives::executor::Packet;
using collectives::executor::Segments;

class NullLink final : public Link {
 public:
  uint64_t send(uint32_t lane, const Segments&, const CallTag&) override { return ++sent_[lane]; }
  bool delivered(uint32_t, uint64_t) override { return true; }
  bool peek(uint32_t, size_t expected, const CallTag&, Segments& message, absl::Status&) override {
    message = {bytes_, std::min(expected, sizeof bytes_), 1, 0};
    return true;
  }
  bool consume(uint32_t) override { return true; }
  // No call between two ranks comes here.
  size_t most_behind() const override { return 0; }
  bool tell(const Packet&, absl::Span<const std::byte>) override { return false; }
  bool hear(Packet&, absl::Span<const std::byte>&) override { return false; }
  void heard() override {}
  bool reads() const override { return true; }
  std::string route() const override { return "null"; }

 private:
  uint64_t sent_[collectives::executor::kLanes] = {};
  alignas(64) std::byte bytes_[64] = {};
};

struct Options {
  uint32_t ranks = 8;
  int calls = 2000;
  std::string json;
};

int run(const Options& options) {
  const collectives::schedules::ScheduleSpec spec{
      .collective = Collective::kAllReduce, .algorithm = Algorithm::kRing, .ranks = options.ranks};
  absl::StatusOr<collectives::schedules::Program> program =
      collectives::schedules::write_program(spec, 0);
  if (!program.ok()) {
    std::fprintf(stderr, "baton executor_bench: %s\n",
                 std::string(program.status().message()).c_str());
    return 2;
  }
  std::vector<collectives::executor::PreparedProgram> programs;
  programs.push_back(collectives::executor::prepare(*std::move(program), spec.collective, 0, true));
  std::vector<NullLink> nulls(options.ranks);
  std::vector<Link*> links;
  for (NullLink& link : nulls) links.push_back(&link);
  collectives::executor::FlightRecorder recorder(0);
  Executor executor(0, links, nullptr, Clock::steady(), &recorder);

  // Parts of one float: the arithmetic costs nothing, the steps remain. 64 pieces a call.
  std::vector<float> data(size_t{64} * options.ranks);
  std::vector<double> ns;
  for (int i = 0; i < options.calls; ++i) {
    Call call;
    call.geometry = {Collective::kAllReduce, sizeof(float), data.size(), 1, options.ranks};
    call.in = call.out = reinterpret_cast<std::byte*>(data.data());
    call.programs = &programs;
    call.pieces = call.geometry.pieces();
    const uint64_t before = executor.steps();
    const Time begin = Clock::steady().now();
    executor.start(call);
    while (!executor.idle()) {
      if (!executor.advance().ok()) return 1;
    }
    const Time took = Clock::steady().now() - begin;
    ns.push_back(static_cast<double>(took.count()) /
                 static_cast<double>(executor.steps() - before));
  }
  std::sort(ns.begin(), ns.end());
  const double median = ns[ns.size() / 2];
  std::printf("executor, null links, ring of %u: %.0f ns per step (median of %d calls; p99 %.0f)\n",
              options.ranks, median, options.calls, ns[ns.size() * 99 / 100]);
  if (options.json.empty()) return 0;
  Row row;
  row.bench = "executor_bench";
  row.params = {{"ranks", options.ranks}, {"calls", options.calls}};
  row.route = "null";
  row.seconds = median * 1e-9;
  absl::Status status = write_json(options.json, {row});
  if (!status.ok())
    std::fprintf(stderr, "baton executor_bench: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace

int executor_bench_main(int argc, char** argv) {
  Options options;
  CLI::App app("Measures the executor's cost per step of a schedule, with links that do nothing.");
  app.add_option("--ranks", options.ranks, "of the schedule")
      ->check(engine::command_line::whole_number(2, 4096))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "how many")
      ->check(engine::command_line::whole_number(1, 1 << 24))
      ->capture_default_str();
  app.add_option("--json", options.json, "write one JSON object per row")
      ->check(engine::command_line::writable_file())
      ->type_name("FILE");
  if (const int status = engine::command_line::parse(app, "baton executor_bench", argc, argv);
      status >= 0) {
    return status;
  }
  return run(options);
}

}  // namespace baton::bench
