// Measuring what links and reductions cost, once, when a communicator starts.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives/communicator_impl.h"
#include "collectives/reduce.h"

namespace baton {

using collectives::CostParameters;
using collectives::LinkCost;

namespace {

constexpr int kPings = 24;
constexpr int kLarge = 4;
constexpr size_t kReduceBytes = 256 << 10;

double seconds(Time time) { return std::chrono::duration<double>(time).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

// The partners of a measurement, each other's: UINT32_MAX where a rank has none.
static uint32_t partner_of(uint32_t rank, uint32_t ranks, uint32_t distance) {
  const uint32_t other = rank / distance % 2 == 0 ? rank + distance : rank - distance;
  return other < ranks ? other : UINT32_MAX;
}

absl::Status Communicator::Impl::calibrate() {
  const Time started = now();
  CostParameters cost = model->parameters();
  absl::StatusOr<Block> block = memory->allocate(std::max(options.slot_bytes, 2 * kReduceBytes));
  if (!block.ok()) return block.status();
  std::byte* data = block->data;

  auto exchange = [&](uint32_t other, size_t bytes) -> absl::Status {
    // The lower rank sends first; both directions are timed together.
    for (bool sends : {rank<other, rank> other}) {
      absl::StatusOr<Work> work = begin_point_to_point(sends, data, bytes, DataType::kU8,
                                                       static_cast<int>(other), CallOptions{});
      if (!work.ok()) return work.status();
      if (absl::Status status = wait(*work); !status.ok()) return status;
    }
    return absl::OkStatus();
  };
  auto measure = [&](uint32_t other, LinkCost& link) -> absl::Status {
    std::vector<double> small, large;
    for (int i = 0; i < kPings; ++i) {
      const Time begin = now();
      if (absl::Status status = exchange(other, 8); !status.ok()) return status;
      small.push_back(seconds(now() - begin) / 2);
    }
    link.alpha = median(small);
    for (int i = 0; i < kLarge; ++i) {
      const Time begin = now();
      if (absl::Status status = exchange(other, options.slot_bytes); !status.ok()) return status;
      large.push_back(seconds(now() - begin) / 2);
    }
    link.beta =
        std::max(1e-12, (median(large) - link.alpha) / static_cast<double>(options.slot_bytes));
    return absl::OkStatus();
  };

  absl::Status status;
  if (ranks > 1) {
    const bool one_node = node_size >= ranks;
    const uint32_t neighbour = partner_of(rank, ranks, 1);
    if (neighbour != UINT32_MAX) status = measure(neighbour, cost.local);
    if (status.ok() && !one_node) {
      const uint32_t across = partner_of(rank, ranks, node_size);
      if (across != UINT32_MAX) status = measure(across, cost.remote);
    } else {
      cost.remote = cost.local;
    }
  }
  if (status.ok()) {
    std::vector<double> passes;
    const size_t count = kReduceBytes / sizeof(float);
    auto* a = reinterpret_cast<float*>(data);
    std::memset(data, 0, 2 * kReduceBytes);
    for (int i = 0; i < 8; ++i) {
      const Time begin = now();
      collectives::reduce(DataType::kF32, ReduceOp::kSum, a, a, a + count, count);
      passes.push_back(seconds(now() - begin));
    }
    cost.gamma = median(passes) / static_cast<double>(kReduceBytes);
  }
  // Everybody must choose alike: what all use is what all measured, taken together.
  std::vector<CostParameters> all(ranks, cost);
  if (status.ok() && ranks > 1) {
    const std::string mine = collectives::encode(cost);
    std::vector<char> gathered(ranks * mine.size());
    CallOptions plain;
    plain.algorithm = Algorithm::kDirect;
    absl::StatusOr<Work> work = begin({Collective::kAllGather, mine.data(), gathered.data(),
                                       mine.size(), DataType::kU8, ReduceOp::kSum, 0, plain});
    status = work.ok() ? wait(*work) : work.status();
    for (uint32_t r = 0; r < ranks && status.ok(); ++r) {
      absl::StatusOr<CostParameters> theirs = collectives::decode_cost_parameters(
          std::string_view(gathered.data() + r * mine.size(), mine.size()));
      status = theirs.status();
      if (theirs.ok()) all[r] = *theirs;
    }
  }
  memory->free(*block);
  if (!status.ok()) return status;
  CostParameters agreed = collectives::agree(all);
  agreed.cores_move_local = cost.cores_move_local;
  model->set_parameters(agreed);
  choices.clear();
  last_choice = nullptr;
  calibrated_in = now() - started;
  return absl::OkStatus();
}

}  // namespace baton
