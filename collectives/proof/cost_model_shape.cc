// Counting the shape of a schedule.
#include "collectives/proof/cost_model_shape.h"

#include <algorithm>

#include "collectives/proof/simulate_programs.h"

namespace baton::collectives::proof {

using schedules::Program;
using schedules::Step;

namespace {

// Above this many steps of all ranks together, or of one, ranks are sampled. Long programs are
// those in which all ranks do alike, round by round; trees, where a single rank tells little, are
// short.
constexpr size_t kMostSimulatedSteps = 60'000;
constexpr size_t kMostStepsOfARank = 128;
constexpr uint32_t kSampledRanks = 16;

// Seconds that remember what they were spent on.
struct Instant {
  double seconds = 0;
  std::array<float, kSpentKinds> amounts{};
};
void spend(Instant& instant, Spent what, double amount, double seconds) {
  instant.seconds += seconds;
  instant.amounts[what] += static_cast<float>(amount);
}
double seconds_of(const Instant& instant) { return instant.seconds; }

// Costs under which different chains become the longest: messages that are all latency, and
// messages that are all bandwidth.
CostParameters reference_cost(uint32_t node_size) {
  CostParameters cost;
  cost.local = {1e-6, 1 / 10e9};
  cost.remote = {5e-6, 1 / 5e9};
  cost.gamma = 1 / 10e9;
  cost.step = 0.2e-6;
  cost.node_size = node_size;
  return cost;
}
constexpr size_t kReferencePartBytes[] = {16, 1 << 20};

double seconds(const Amounts& amounts, const CostParameters& cost, double part_bytes) {
  return amounts[kLocalAlpha] * cost.local.alpha + amounts[kRemoteAlpha] * cost.remote.alpha +
         amounts[kSteps] * cost.step +
         part_bytes *
             (amounts[kLocalBytes] * cost.local.beta + amounts[kRemoteBytes] * cost.remote.beta +
              amounts[kCombinedBytes] * cost.gamma);
}

// Everything that one rank's programs send and do, as a share of one piece.
class RankLoad {
 public:
  RankLoad(uint32_t rank, uint32_t node_size) : rank_(rank), node_size_(node_size) {}

  void add(const Program& program, double share) {
    bool sending = true;
    for (const Step& step : program.steps) {
      load_[kSteps] += share;
      const bool local = rank_ / node_size_ == step.peer / node_size_;
      const Spent bytes = local ? kLocalBytes : kRemoteBytes;
      const double parts = share * step.parts;
      switch (step.kind) {
        case Step::Kind::kSend:
          load_[bytes] += parts;
          sending = true;
          break;
        case Step::Kind::kReceiveReduce:
          load_[kCombinedBytes] += parts;
          [[fallthrough]];
        case Step::Kind::kReceive:
          received_[bytes] += parts;
          // A message that arrives after this rank has sent is one more round; the others came
          // together with it.
          if (sending) received_[local ? kLocalAlpha : kRemoteAlpha] += share;
          sending = false;
          break;
        case Step::Kind::kCopy:
        case Step::Kind::kReduce:
          load_[kCombinedBytes] += parts;
          break;
        case Step::Kind::kFold:
          fold_parts_ += share;
          break;
      }
    }
  }
  // Only the spec tells how much a fold combines.
  void finish(uint32_t ranks) { load_[kCombinedBytes] += fold_parts_ * (ranks - 1); }

  const Amounts& load() const { return load_; }
  const Amounts& received() const { return received_; }
  // The rank's costs if no rank ever waits for a slower one.
  Amounts chain() const {
    Amounts chain = received_;
    chain[kSteps] = load_[kSteps];
    chain[kCombinedBytes] = load_[kCombinedBytes];
    return chain;
  }

 private:
  uint32_t rank_;
  uint32_t node_size_;
  double fold_parts_ = 0;
  Amounts load_{};
  Amounts received_{};
};

// Keeps `amounts` if nothing kept is at least as large in everything, and drops what is smaller.
void keep(std::vector<Amounts>& kept, const Amounts& amounts) {
  auto covers = [](const Amounts& a, const Amounts& b) {
    for (int i = 0; i < kSpentKinds; ++i) {
      if (a[i] < b[i]) return false;
    }
    return true;
  };
  for (const Amounts& other : kept) {
    if (covers(other, amounts)) return;
  }
  kept.erase(std::remove_if(kept.begin(), kept.end(),
                            [&](const Amounts& other) { return covers(amounts, other); }),
             kept.end());
  kept.push_back(amounts);
}

Amounts in_parts(const Instant& instant, size_t part_bytes) {
  Amounts amounts;
  std::copy(instant.amounts.begin(), instant.amounts.end(), amounts.begin());
  for (Spent what : {kLocalBytes, kRemoteBytes, kCombinedBytes}) {
    amounts[what] /= static_cast<double>(part_bytes);
  }
  return amounts;
}

absl::Status count_chains(const schedules::ScheduleSpec& spec, const ProgramSource& program,
                          uint32_t node_size, ScheduleShape& shape) {
  // Channels are variants of each other: the first tells how long one takes.
  absl::StatusOr<SimulatedPrograms> programs = read_programs(spec, program, 1);
  if (!programs.ok()) return programs.status();
  SimulateOptions options;
  options.cost = reference_cost(node_size);
  options.lanes = 1;
  for (size_t part_bytes : kReferencePartBytes) {
    options.piece_bytes = part_bytes * shape.parts;
    options.bytes = 2 * options.piece_bytes;
    SimulateEngine<Instant> engine(*programs, options);
    if (absl::Status status = engine.run(); !status.ok()) return status;
    keep(shape.chains, in_parts(engine.piece_done(0), part_bytes));
    keep(shape.chains_of_two, in_parts(engine.piece_done(1), part_bytes));
  }
  return absl::OkStatus();
}

bool same(const Program& a, const Program& b) {
  auto same_step = [](const Step& x, const Step& y) {
    return x.kind == y.kind && x.peer == y.peer && x.parts == y.parts && x.source == y.source &&
           x.target == y.target;
  };
  return std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(), same_step);
}

}  // namespace

PieceSeconds price(const ScheduleShape& shape, const CostParameters& given, double part_bytes) {
  // The steps of all ranks take turns on the cores, whatever they wait for meanwhile.
  CostParameters cost = given;
  cost.local.alpha = std::max(0.0, given.local.alpha - given.shared_step);
  cost.remote.alpha = std::max(0.0, given.remote.alpha - given.shared_step);
  const double shared = shape.mean_steps * given.shared_step;
  PieceSeconds out;
  double two = 0;
  for (const Amounts& chain : shape.chains) {
    out.alone = std::max(out.alone, seconds(chain, cost, part_bytes));
  }
  for (const Amounts& chain : shape.chains_of_two) {
    two = std::max(two, seconds(chain, cost, part_bytes));
  }
  out.next = std::max(0.0, two - out.alone) + shared;
  out.alone += shared;
  out.busy = shared;
  for (const std::vector<Amounts>* kind : {&shape.loads, &shape.received}) {
    for (const Amounts& amounts : *kind) {
      const double core =
          amounts[kSteps] * cost.step + part_bytes * amounts[kCombinedBytes] * cost.gamma;
      const double local = part_bytes * amounts[kLocalBytes] * cost.local.beta;
      const double remote = part_bytes * amounts[kRemoteBytes] * cost.remote.beta;
      const double on_core = cost.cores_move_local ? core + local : core;
      out.busy = std::max({out.busy, on_core, local, remote});
    }
  }
  return out;
}

absl::StatusOr<ScheduleShape> count_shape(const schedules::ScheduleSpec& spec, uint32_t node_size) {
  if (absl::Status status = schedules::validate(spec); !status.ok()) return status;
  ScheduleShape shape;
  shape.parts = std::max(1u, schedules::parts_of(spec));
  shape.max_message_parts = std::max(1u, schedules::max_message_parts(spec));
  absl::StatusOr<Program> first = schedules::write_program(spec, 0);
  if (!first.ok()) return first.status();
  // Rank 0 may be a leaf, or the only one that works: look at one in the middle as well.
  absl::StatusOr<Program> middle = schedules::write_program(spec, spec.ranks / 2);
  if (!middle.ok()) return middle.status();
  const size_t steps = std::max(first->steps.size(), middle->steps.size());
  const bool sampled = steps > kMostStepsOfARank || steps * spec.ranks > kMostSimulatedSteps;

  const uint32_t stride = sampled ? std::max(1u, spec.ranks / kSampledRanks) : 1;
  uint32_t counted = 0;
  for (uint32_t rank = 0; rank < spec.ranks; rank += stride) {
    RankLoad load(rank, node_size);
    absl::StatusOr<Program> first_channel;
    for (uint32_t channel = 0; channel < spec.channels; ++channel) {
      absl::StatusOr<Program> program = schedules::write_program(spec, rank, channel);
      if (!program.ok()) return program.status();
      load.add(*program, 1.0 / spec.channels);
      if (channel == 0) {
        first_channel = std::move(program);
      } else if (!shape.channels_differ) {
        shape.channels_differ = !same(*first_channel, *program);
      }
    }
    load.finish(spec.ranks);
    keep(shape.loads, load.load());
    keep(shape.received, load.received());
    shape.mean_steps += (load.load()[kSteps] - shape.mean_steps) / ++counted;
    if (!sampled) continue;
    Amounts chain = load.chain();
    keep(shape.chains, chain);
    for (double& amount : chain) amount *= 2;
    keep(shape.chains_of_two, chain);
  }
  if (sampled) return shape;
  const ProgramSource program = [&spec](uint32_t rank, uint32_t channel) {
    return write_program(spec, rank, channel);
  };
  if (absl::Status status = count_chains(spec, program, node_size, shape); !status.ok()) {
    return status;
  }
  return shape;
}

}  // namespace baton::collectives::proof
