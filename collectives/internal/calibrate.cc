// Calibration: pings between pairs, a reduction loop, and what all ranks make of them.
#include "collectives/internal/calibrate.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/prediction/cost_model_shape.h"
#include "collectives/reduce/reduce.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/base/quantile.h"

namespace baton::collectives::internal {

using prediction::CostParameters;

namespace {

// Ranks of large groups mostly share cores: there each measurement is made once for every kFewer.
constexpr uint32_t kLargeGroup = 8;
constexpr int kFewer = 4;
constexpr int kPings = 24;
constexpr int kLarge = 16;
constexpr int kPasses = 8;
constexpr int kSums = 8;
constexpr size_t kReduceBytes = 256 << 10;
constexpr size_t kRewriteBytes = 64 << 10;
constexpr int kRewrites = 16;     // half of them streamed
constexpr double kClearly = 0.8;  // streaming must take less than this part of the time

// The partners of a measurement, each other's: UINT32_MAX where a rank has none.
uint32_t partner_of(uint32_t rank, uint32_t ranks, uint32_t distance) {
  const uint32_t other = rank / distance % 2 == 0 ? rank + distance : rank - distance;
  return other < ranks ? other : UINT32_MAX;
}

class Measurement {
 public:
  Measurement(const Calibration& with, std::byte* data) : with_(with), data_(data) {}

  absl::Status links(CostParameters& cost) {
    const uint32_t neighbour = partner_of(with_.rank, with_.ranks, 1);
    if (neighbour != UINT32_MAX) {
      if (absl::Status status = link(neighbour, cost.local); !status.ok()) return status;
    }
    if (with_.node_size >= with_.ranks) {
      cost.remote = cost.local;
      return absl::OkStatus();
    }
    const uint32_t across = partner_of(with_.rank, with_.ranks, with_.node_size);
    return across != UINT32_MAX ? link(across, cost.remote) : absl::OkStatus();
  }

  // Whether to overwrite past the caches what the neighbour has just read: the time to write it and
  // to read it again, each way.
  absl::StatusOr<bool> stream_over_read() {
    const uint32_t neighbour = partner_of(with_.rank, with_.ranks, 1);
    if (neighbour == UINT32_MAX) return false;
    std::byte* const sent = data_ + kRewriteBytes;
    std::byte* const other = data_ + 2 * kRewriteBytes;
    std::vector<double> took[2];
    for (int i = 0; i < times(kRewrites); ++i) {
      const bool first = with_.rank < neighbour;
      for (bool sends : {first, !first}) {
        absl::Status status = with_.exchange(sends, sends ? sent : data_, kRewriteBytes, neighbour);
        if (!status.ok()) return status;
      }
      const bool streams = i % 2 == 1;
      const Time begin = with_.clock->now();
      if (streams) {
        base::stream_copy(sent, other, kRewriteBytes);
        base::stream_fence();
      } else {
        std::memcpy(sent, other, kRewriteBytes);
      }
      std::memcpy(other, sent, kRewriteBytes);
      took[streams].push_back(seconds_since(begin));
    }
    return base::median(took[1]) < kClearly * base::median(took[0]);
  }

  // When ranks share cores, a schedule takes the waiting time of its messages plus the work of all
  // ranks. Timing two schedules with different shares of both gives the cost of each.
  absl::Status shared_step(CostParameters& cost) {
    double rounds[2], steps[2], seconds[2];
    for (const int i : {0, 1}) {
      const Algorithm algorithm = i == 0 ? Algorithm::kRecursiveDoubling : Algorithm::kTree;
      const auto shape = prediction::count_shape(
          {.collective = Collective::kAllReduce, .algorithm = algorithm, .ranks = with_.ranks},
          with_.node_size);
      if (!shape.ok()) return shape.status();
      rounds[i] = 0;
      for (const prediction::Amounts& chain : shape->chains) {
        rounds[i] =
            std::max(rounds[i], chain[prediction::kLocalAlpha] + chain[prediction::kRemoteAlpha]);
      }
      steps[i] = shape->mean_steps;
      std::vector<double> took;
      for (int sum = 0; sum <= times(kSums); ++sum) {
        const Time begin = with_.clock->now();
        if (absl::Status status = with_.sum(algorithm); !status.ok()) return status;
        if (sum > 0) took.push_back(seconds_since(begin));
      }
      seconds[i] = base::median(took);
    }
    if (!with_.shares_cores) return absl::OkStatus();
    const double both = rounds[0] * steps[1] - rounds[1] * steps[0];
    double round = (seconds[0] * steps[1] - seconds[1] * steps[0]) / both;
    double step = (rounds[0] * seconds[1] - rounds[1] * seconds[0]) / both;
    if (!(round > 0)) {
      round = 0;
      step = (seconds[0] / steps[0] + seconds[1] / steps[1]) / 2;
    }
    cost.shared_step = std::max(0.0, step);
    if (with_.node_size >= with_.ranks) {
      cost.local.alpha = cost.remote.alpha = round + cost.shared_step;
    }
    return absl::OkStatus();
  }

  double seconds_per_reduced_byte() {
    const size_t count = kReduceBytes / sizeof(float);
    auto* a = reinterpret_cast<float*>(data_);
    std::memset(data_, 0, 2 * kReduceBytes);
    std::vector<double> passes;
    for (int i = 0; i < kPasses; ++i) {
      const Time begin = with_.clock->now();
      reduce::reduce(DataType::kF32, ReduceOp::kSum, a, a, a + count, count);
      passes.push_back(seconds_since(begin));
    }
    return base::median(passes) / static_cast<double>(kReduceBytes);
  }

 private:
  int times(int count) const { return with_.ranks > kLargeGroup ? count / kFewer : count; }

  double seconds_since(Time begin) const {
    return std::chrono::duration<double>(with_.clock->now() - begin).count();
  }

  absl::Status link(uint32_t other, prediction::LinkCost& cost) {
    absl::StatusOr<double> small = message(other, 8, kPings);
    if (!small.ok()) return small.status();
    absl::StatusOr<double> large = message(other, with_.slot_bytes, kLarge);
    if (!large.ok()) return large.status();
    cost.alpha = *small;
    cost.beta = std::max(1e-12, (*large - *small) / static_cast<double>(with_.slot_bytes));
    return absl::OkStatus();
  }

  // Seconds for one message, out of `rounds` there and back.
  absl::StatusOr<double> message(uint32_t other, size_t bytes, int rounds) {
    std::vector<double> took;
    for (int i = 0; i < times(rounds); ++i) {
      const Time begin = with_.clock->now();
      // The lower rank sends first; both directions are timed together.
      const bool first = with_.rank < other;
      for (bool sends : {first, !first}) {
        absl::Status status = with_.exchange(sends, data_, bytes, other);
        if (!status.ok()) return status;
      }
      took.push_back(seconds_since(begin) / 2);
    }
    return base::median(took);
  }

  const Calibration& with_;
  std::byte* const data_;
};

// All ranks must choose alike: what all use is what all measured, taken together.
absl::StatusOr<CostParameters> agreed(const Calibration& with, const CostParameters& cost) {
  const std::string mine = encode(cost);
  std::vector<char> gathered(with.ranks * mine.size());
  if (absl::Status status = with.gather(mine, gathered.data()); !status.ok()) return status;
  std::vector<CostParameters> all;
  for (uint32_t r = 0; r < with.ranks; ++r) {
    absl::StatusOr<CostParameters> theirs = prediction::decode_cost_parameters(
        std::string_view(gathered.data() + r * mine.size(), mine.size()));
    if (!theirs.ok()) return theirs.status();
    all.push_back(*theirs);
  }
  return agree(all);
}

}  // namespace

absl::StatusOr<MeasuredCosts> measure_costs(const Calibration& with, const CostParameters& before) {
  absl::StatusOr<Block> block = with.memory->allocate(std::max(with.slot_bytes, 2 * kReduceBytes));
  if (!block.ok()) return block.status();
  Measurement measurement(with, block->data);
  CostParameters cost = before;
  absl::Status status = with.ranks > 1 ? measurement.links(cost) : absl::OkStatus();
  if (status.ok() && with.ranks > 2) status = measurement.shared_step(cost);
  absl::StatusOr<bool> stream_over_read = false;
  if (status.ok()) stream_over_read = measurement.stream_over_read();
  if (status.ok()) status = stream_over_read.status();
  if (status.ok()) cost.gamma = measurement.seconds_per_reduced_byte();
  with.memory->free(*block);
  if (!status.ok()) return status;
  absl::StatusOr<CostParameters> result =
      with.ranks > 1 ? agreed(with, cost)
                     : absl::StatusOr<CostParameters>(prediction::agree({&cost, 1}));
  if (!result.ok()) return result.status();
  result->cores_move_local = before.cores_move_local;
  return MeasuredCosts{*result, *stream_over_read};
}

}  // namespace baton::collectives::internal
