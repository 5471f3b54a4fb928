// Counting the shape of a schedule.
#include "collectives/prediction/cost_model_shape.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_map.h"

namespace baton::collectives::prediction {

using schedules::Program;
using schedules::Step;

namespace {

// Above this many steps of all ranks together, or of one, ranks are sampled. Long programs are
// those in which all ranks do alike, round by round; trees, where a single rank tells little, are
// short.
constexpr size_t kMostSteps = 60'000;
constexpr size_t kMostStepsOfARank = 128;
constexpr uint32_t kSampledRanks = 16;

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
constexpr double kReferencePartBytes[] = {16, 1 << 20};

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

// A moment, and what the time until then was spent on.
struct Instant {
  double seconds = 0;
  Amounts amounts{};
};

// All ranks' programs, one piece after the other: a rank waits for the messages that it receives,
// and a message for those that left its sender before it. What else holds ranks up, loads tell.
class Timing {
 public:
  Timing(const std::vector<Program>& programs, const CostParameters& cost, double part_bytes)
      : programs_(programs), cost_(cost), part_bytes_(part_bytes), ranks_(programs.size()) {}

  // When the last rank is done with each of two pieces.
  std::array<Instant, 2> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        while (advance(rank)) moved = true;
      }
    }
    return done_;
  }

 private:
  struct Rank {
    size_t step = 0, piece = 0;
    Instant now, port;  // when it has sent everything that it has posted
  };

  void spend(Instant& instant, Spent what, double amount) const {
    const double each[kSpentKinds] = {cost_.local.alpha,
                                      cost_.remote.alpha,
                                      cost_.local.beta * part_bytes_,
                                      cost_.remote.beta * part_bytes_,
                                      cost_.gamma * part_bytes_,
                                      cost_.step};
    instant.seconds += amount * each[what];
    instant.amounts[what] += amount;
  }
  static void wait_for(Instant& instant, const Instant& other) {
    if (other.seconds > instant.seconds) instant = other;
  }

  // False: the rank waits for a message, or is done.
  bool advance(uint32_t number) {
    Rank& rank = ranks_[number];
    if (rank.piece == done_.size()) return false;
    const std::vector<Step>& steps = programs_[number].steps;
    if (rank.step == steps.size()) {
      wait_for(done_[rank.piece], rank.now);
      wait_for(done_[rank.piece++], rank.port);
      rank.step = 0;
      return true;
    }
    const Step& step = steps[rank.step];
    const bool local = number / cost_.node_size == step.peer / cost_.node_size;
    if (step.kind == Step::Kind::kSend) {
      spend(rank.now, kSteps, 1);
      wait_for(rank.port, rank.now);
      spend(rank.port, local ? kLocalBytes : kRemoteBytes, step.parts);
      Instant there = rank.port;
      spend(there, local ? kLocalAlpha : kRemoteAlpha, 1);
      messages_[{number, step.peer}].push(there);
    } else if (step.kind == Step::Kind::kReceive || step.kind == Step::Kind::kReceiveReduce) {
      std::queue<Instant>& messages = messages_[{step.peer, number}];
      if (messages.empty()) return false;
      wait_for(rank.now, messages.front());
      messages.pop();
      spend(rank.now, kSteps, 1);
      if (step.kind == Step::Kind::kReceiveReduce) spend(rank.now, kCombinedBytes, step.parts);
    } else {
      const bool folds = step.kind == Step::Kind::kFold;
      spend(rank.now, kSteps, 1);
      spend(rank.now, kCombinedBytes, folds ? static_cast<double>(ranks_.size() - 1) : step.parts);
    }
    ++rank.step;
    return true;
  }

  const std::vector<Program>& programs_;
  const CostParameters cost_;
  const double part_bytes_;
  std::vector<Rank> ranks_;
  absl::flat_hash_map<std::pair<uint32_t, uint32_t>, std::queue<Instant>> messages_;
  std::array<Instant, 2> done_;
};

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
  const bool sampled = steps > kMostStepsOfARank || steps * spec.ranks > kMostSteps;

  std::vector<Program> programs;  // of the first channel, which tells how long one takes
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
    if (!sampled) {
      programs.push_back(*std::move(first_channel));
      continue;
    }
    Amounts chain = load.chain();
    keep(shape.chains, chain);
    for (double& amount : chain) amount *= 2;
    keep(shape.chains_of_two, chain);
  }
  if (sampled) return shape;
  for (const double part_bytes : kReferencePartBytes) {
    const auto [one, two] = Timing(programs, reference_cost(node_size), part_bytes).run();
    keep(shape.chains, one.amounts);
    keep(shape.chains_of_two, two.amounts);
  }
  return shape;
}

}  // namespace baton::collectives::prediction
