// The simulator's front: checks what it is asked, runs the engine, reports.
#include "collectives/proof/simulate.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "collectives/proof/simulate_engine.h"
#include "collectives/proof/simulate_programs.h"

namespace baton::collectives::proof {

using schedules::ScheduleSpec;

namespace {

bool is_time(double seconds) { return std::isfinite(seconds) && seconds >= 0; }

absl::Status check(const ScheduleSpec& spec, const SimulateOptions& options) {
  constexpr size_t kMostBytes = size_t{1} << 56;
  const CostParameters& cost = options.cost;
  for (double seconds : {cost.local.alpha, cost.local.beta, cost.remote.alpha, cost.remote.beta,
                         cost.gamma, cost.step}) {
    if (!is_time(seconds)) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a cost of %g s: costs are finite and not negative", seconds));
    }
  }
  if (spec.ranks == 0 || spec.channels == 0 || cost.node_size == 0) {
    return absl::InvalidArgumentError("ranks, channels and cost.node_size must be at least 1");
  }
  if (options.bytes > kMostBytes || options.piece_bytes == 0 || options.lanes == 0 ||
      options.messages_ahead == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u bytes in pieces of %u in %u lanes, %u messages ahead: at most 2^56 bytes, and at least "
        "one of the others",
        options.bytes, options.piece_bytes, options.lanes, options.messages_ahead));
  }
  if (!options.late.empty() && options.late.size() != spec.ranks) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "`late` has %d entries, but there are %u ranks: give one for each rank or none",
        options.late.size(), spec.ranks));
  }
  if (!std::all_of(options.late.begin(), options.late.end(), is_time)) {
    return absl::InvalidArgumentError("a rank cannot be early: `late` is in seconds, 0 or more");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SimulateReport> simulate(const ScheduleSpec& spec, const ProgramSource& program,
                                        const SimulateOptions& options) {
  if (absl::Status status = check(spec, options); !status.ok()) return status;
  absl::StatusOr<SimulatedPrograms> programs = read_programs(spec, program, spec.channels);
  if (!programs.ok()) return programs.status();

  SimulateEngine<double> engine(*programs, options);
  if (absl::Status status = engine.run(); !status.ok()) return status;
  SimulateReport report;
  report.messages = engine.messages();
  report.rank_seconds.reserve(spec.ranks);
  for (uint32_t rank = 0; rank < spec.ranks; ++rank) {
    report.rank_seconds.push_back(engine.done(rank));
    report.seconds = std::max(report.seconds, engine.done(rank));
    report.most_bytes_sent = std::max(report.most_bytes_sent, engine.bytes_sent(rank));
    report.most_bytes_received = std::max(report.most_bytes_received, engine.bytes_received(rank));
  }
  return report;
}

absl::StatusOr<SimulateReport> simulate(const ScheduleSpec& spec, const SimulateOptions& options) {
  if (absl::Status status = schedules::validate(spec); !status.ok()) return status;
  return simulate(
      spec, [&spec](uint32_t rank, uint32_t channel) { return write_program(spec, rank, channel); },
      options);
}

}  // namespace baton::collectives::proof
