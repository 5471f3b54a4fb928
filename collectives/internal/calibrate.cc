// Calibration: pings between pairs, a reduction loop, and what all ranks make of them.
#include "collectives/internal/calibrate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
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
  Measurement(Mesh& mesh, CallStarter& calls, Driver& driver, size_t slot_bytes, std::byte* data)
      : mesh_(mesh),
        calls_(calls),
        driver_(driver),
        rank_(mesh.rank()),
        ranks_(mesh.ranks()),
        slot_bytes_(slot_bytes),
        data_(data) {}

  absl::Status measure(const CostParameters& before, MeasuredCosts& out) {
    CostParameters cost = before;
    absl::Status status = ranks_ > 1 ? links(cost) : absl::OkStatus();
    if (status.ok() && ranks_ > 2) status = shared_step(cost);
    if (!status.ok()) return status;
    const absl::StatusOr<bool> streams = stream_over_read();
    if (!streams.ok()) return streams.status();
    out.stream_over_read = *streams;
    cost.gamma = seconds_per_reduced_byte();
    status = agree(cost, out.parameters);
    out.parameters.cores_move_local = before.cores_move_local;
    return status;
  }

 private:
  absl::Status links(CostParameters& cost) {
    const uint32_t neighbour = partner_of(rank_, ranks_, 1);
    if (neighbour != UINT32_MAX) {
      if (absl::Status status = link(neighbour, cost.local); !status.ok()) return status;
    }
    if (mesh_.node_size() >= ranks_) {
      cost.remote = cost.local;
      return absl::OkStatus();
    }
    const uint32_t across = partner_of(rank_, ranks_, mesh_.node_size());
    return across != UINT32_MAX ? link(across, cost.remote) : absl::OkStatus();
  }

  // Whether to overwrite past the caches what the neighbour has just read: the time to write it and
  // to read it again, each way.
  absl::StatusOr<bool> stream_over_read() {
    const uint32_t neighbour = partner_of(rank_, ranks_, 1);
    if (neighbour == UINT32_MAX) return false;
    std::byte* const sent = data_ + kRewriteBytes;
    std::byte* const other = data_ + 2 * kRewriteBytes;
    std::vector<double> took[2];
    for (int i = 0; i < times(kRewrites); ++i) {
      const bool first = rank_ < neighbour;
      for (bool sends : {first, !first}) {
        absl::Status status = exchange(sends, sends ? sent : data_, kRewriteBytes, neighbour);
        if (!status.ok()) return status;
      }
      const bool streams = i % 2 == 1;
      const Time begin = mesh_.now();
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
          {.collective = Collective::kAllReduce, .algorithm = algorithm, .ranks = ranks_},
          mesh_.node_size());
      if (!shape.ok()) return shape.status();
      rounds[i] = 0;
      for (const prediction::Amounts& chain : shape->chains) {
        rounds[i] =
            std::max(rounds[i], chain[prediction::kLocalAlpha] + chain[prediction::kRemoteAlpha]);
      }
      steps[i] = shape->mean_steps;
      std::vector<double> took;
      for (int turn = 0; turn <= times(kSums); ++turn) {
        const Time begin = mesh_.now();
        if (absl::Status status = sum(algorithm); !status.ok()) return status;
        if (turn > 0) took.push_back(seconds_since(begin));
      }
      seconds[i] = base::median(took);
    }
    if (!mesh_.crowded()) return absl::OkStatus();
    const double both = rounds[0] * steps[1] - rounds[1] * steps[0];
    double round = (seconds[0] * steps[1] - seconds[1] * steps[0]) / both;
    double step = (rounds[0] * seconds[1] - rounds[1] * seconds[0]) / both;
    if (!(round > 0)) {
      round = 0;
      step = (seconds[0] / steps[0] + seconds[1] / steps[1]) / 2;
    }
    cost.shared_step = std::max(0.0, step);
    if (mesh_.node_size() >= ranks_) {
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
      const Time begin = mesh_.now();
      reduce::reduce(DataType::kF32, ReduceOp::kSum, a, a, a + count, count);
      passes.push_back(seconds_since(begin));
    }
    return base::median(passes) / static_cast<double>(kReduceBytes);
  }

  // All ranks must choose alike: what all use is what all measured, taken together.
  absl::Status agree(const CostParameters& cost, CostParameters& agreed) {
    if (ranks_ == 1) {
      agreed = prediction::agree({&cost, 1});
      return absl::OkStatus();
    }
    const std::string mine = encode(cost);
    std::string gathered(ranks_ * mine.size(), 0);
    CallOptions plain;
    // Recursive doubling uses only links that are connected already.
    plain.algorithm = Algorithm::kRecursiveDoubling;
    absl::Status status =
        wait(calls_.begin({Collective::kAllGather, mine.data(), gathered.data(), mine.size(),
                           DataType::kU8, ReduceOp::kSum, 0, &plain}));
    if (!status.ok()) return status;
    std::vector<CostParameters> all;
    for (uint32_t r = 0; r < ranks_; ++r) {
      const auto theirs = prediction::decode_cost_parameters(
          std::string_view(gathered).substr(r * mine.size(), mine.size()));
      if (!theirs.ok()) return theirs.status();
      all.push_back(*theirs);
    }
    agreed = prediction::agree(all);
    return absl::OkStatus();
  }

  int times(int count) const { return ranks_ > kLargeGroup ? count / kFewer : count; }

  double seconds_since(Time begin) const {
    return std::chrono::duration<double>(mesh_.now() - begin).count();
  }

  absl::Status link(uint32_t other, prediction::LinkCost& cost) {
    absl::StatusOr<double> small = message(other, 8, kPings);
    if (!small.ok()) return small.status();
    absl::StatusOr<double> large = message(other, slot_bytes_, kLarge);
    if (!large.ok()) return large.status();
    cost.alpha = *small;
    cost.beta = std::max(1e-12, (*large - *small) / static_cast<double>(slot_bytes_));
    return absl::OkStatus();
  }

  // Seconds for one message, out of `rounds` there and back.
  absl::StatusOr<double> message(uint32_t other, size_t bytes, int rounds) {
    std::vector<double> took;
    for (int i = 0; i < times(rounds); ++i) {
      const Time begin = mesh_.now();
      // The lower rank sends first; both directions are timed together.
      const bool first = rank_ < other;
      for (bool sends : {first, !first}) {
        absl::Status status = exchange(sends, data_, bytes, other);
        if (!status.ok()) return status;
      }
      took.push_back(seconds_since(begin) / 2);
    }
    return base::median(took);
  }

  absl::Status wait(const absl::StatusOr<Work>& work) {
    return work.ok() ? driver_.wait(*work) : work.status();
  }
  absl::Status exchange(bool sends, std::byte* data, size_t bytes, uint32_t other) {
    return wait(calls_.begin_point_to_point(sends, data, bytes, DataType::kU8,
                                            static_cast<int>(other), CallOptions{}));
  }
  // Sums a few bytes.
  absl::Status sum(Algorithm algorithm) {
    std::array<float, 2> data{};
    CallOptions plain;
    plain.algorithm = algorithm;
    plain.ordered = false;
    return wait(calls_.begin({Collective::kAllReduce, data.data(), data.data(), data.size(),
                              DataType::kF32, ReduceOp::kSum, 0, &plain}));
  }

  Mesh& mesh_;
  CallStarter& calls_;
  Driver& driver_;
  const uint32_t rank_, ranks_;
  const size_t slot_bytes_;
  std::byte* const data_;
};

}  // namespace

absl::StatusOr<MeasuredCosts> measure_costs(Mesh& mesh, CallStarter& calls, Driver& driver,
                                            size_t slot_bytes, const CostParameters& before) {
  absl::StatusOr<Block> block = mesh.memory().allocate(std::max(slot_bytes, 2 * kReduceBytes));
  if (!block.ok()) return block.status();
  Measurement measurement(mesh, calls, driver, slot_bytes, block->data);
  MeasuredCosts out;
  const absl::Status status = measurement.measure(before, out);
  mesh.memory().free(*block);
  if (!status.ok()) return status;
  return out;
}

}  // namespace baton::collectives::internal
