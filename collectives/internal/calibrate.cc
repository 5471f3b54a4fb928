// Calibration: pings between pairs, a reduction loop, and what all ranks make of them.
#include "collectives/internal/calibrate.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/reduce/reduce.h"
#include "transport/base/quantile.h"

namespace baton::collectives::internal {

using proof::CostParameters;

namespace {

constexpr int kPings = 24;
constexpr int kLarge = 16;
constexpr int kPasses = 8;
constexpr size_t kReduceBytes = 256 << 10;

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
  double seconds_since(Time begin) const {
    return std::chrono::duration<double>(with_.clock->now() - begin).count();
  }

  absl::Status link(uint32_t other, proof::LinkCost& cost) {
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
    for (int i = 0; i < rounds; ++i) {
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
    absl::StatusOr<CostParameters> theirs = proof::decode_cost_parameters(
        std::string_view(gathered.data() + r * mine.size(), mine.size()));
    if (!theirs.ok()) return theirs.status();
    all.push_back(*theirs);
  }
  return agree(all);
}

}  // namespace

absl::StatusOr<CostParameters> measure_costs(const Calibration& with,
                                             const CostParameters& before) {
  absl::StatusOr<Block> block = with.memory->allocate(std::max(with.slot_bytes, 2 * kReduceBytes));
  if (!block.ok()) return block.status();
  Measurement measurement(with, block->data);
  CostParameters cost = before;
  absl::Status status = with.ranks > 1 ? measurement.links(cost) : absl::OkStatus();
  if (status.ok()) cost.gamma = measurement.seconds_per_reduced_byte();
  with.memory->free(*block);
  if (!status.ok()) return status;
  absl::StatusOr<CostParameters> result =
      with.ranks > 1 ? agreed(with, cost)
                     : absl::StatusOr<CostParameters>(proof::agree({&cost, 1}));
  if (result.ok()) result->cores_move_local = before.cores_move_local;
  return result;
}

}  // namespace baton::collectives::internal
