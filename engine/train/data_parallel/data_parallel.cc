// Launches the collective of each bucket, and converts to bf16 for the wire.
#include "engine/train/data_parallel/data_parallel.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::engine::train {
namespace {

constexpr size_t kTask = 16384;

template <typename Convert>
void convert(ComputePool& pool, const FlatRange& range, const Convert& one) {
  const auto tasks = static_cast<int64_t>((range.size() + kTask - 1) / kTask);
  pool.parallel_for(tasks, [&](int64_t task, int) {
    const size_t begin = range.begin + static_cast<size_t>(task) * kTask;
    const size_t end = std::min(range.end, begin + kTask);
    for (size_t i = begin; i < end; ++i) one(i);
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::create(
    Communicator& comm, CallTracker& calls, ComputePool& pool, const ParallelOptions& options,
    const std::vector<FlatRange>& buckets) {
  auto reducer =
      std::unique_ptr<GradientReducer>(new GradientReducer(comm, calls, pool, options, buckets));
  if (options.wire == DataType::kBF16) {
    absl::StatusOr<FlatArray> wire = FlatArray::make(&comm, buckets.back().end / 2);
    if (!wire.ok()) return wire.status();
    reducer->wire_ = *std::move(wire);
  }
  return reducer;
}

FlatRange GradientReducer::own_part(const FlatRange& bucket) const {
  return options_.zero > 0 ? part_of(bucket, comm_.rank(), comm_.ranks()) : bucket;
}

CallTracker::Id GradientReducer::launch(size_t bucket, float* gradients) {
  const FlatRange range = buckets_[bucket];
  const FlatRange part = own_part(range);
  char* data = reinterpret_cast<char*>(gradients);
  if (options_.wire == DataType::kBF16) {
    auto* wire = reinterpret_cast<uint16_t*>(wire_.data());
    convert(pool_, range, [&](size_t i) { wire[i] = bf16_from_float(gradients[i]); });
    data = reinterpret_cast<char*>(wire);
  }
  const size_t width = size_of(options_.wire);
  const void* in = data + range.begin * width;
  void* out = data + part.begin * width;
  const Time begin = Clock::steady().now();
  absl::StatusOr<Work> work =
      options_.zero > 0
          ? comm_.reduce_scatter_async(in, out, part.size(), options_.wire, ReduceOp::kSum)
          : comm_.all_reduce_async(in, out, range.size(), options_.wire, ReduceOp::kSum);
  return calls_.add(std::move(work), begin, absl::StrCat("gradients, bucket ", bucket),
                    range.size() * width);
}

void GradientReducer::ready(float* gradients, size_t end) {
  if (!options_.overlap) return;
  for (; next_ < buckets_.size() && buckets_[next_].end <= end; ++next_) {
    launched_[next_] = launch(next_, gradients);
  }
}

absl::Status GradientReducer::wait(size_t bucket, float* gradients) {
  for (; next_ < buckets_.size(); ++next_) launched_[next_] = launch(next_, gradients);
  if (bucket + 1 == buckets_.size()) next_ = 0;
  if (absl::Status status = calls_.wait(launched_[bucket]); !status.ok()) return status;
  if (options_.wire == DataType::kBF16) {
    const auto* wire = reinterpret_cast<const uint16_t*>(wire_.data());
    convert(pool_, own_part(buckets_[bucket]),
            [&](size_t i) { gradients[i] = float_from_bf16(wire[i]); });
  }
  return absl::OkStatus();
}

void WeightGatherer::updated(size_t bucket, float* parameters) {
  const FlatRange range = buckets_[bucket];
  const FlatRange part = part_of(range, comm_.rank(), comm_.ranks());
  const Time begin = Clock::steady().now();
  absl::StatusOr<Work> work = comm_.all_gather_async(
      parameters + part.begin, parameters + range.begin, part.size(), DataType::kF32);
  pending_[bucket] = calls_.add(std::move(work), begin, absl::StrCat("weights, bucket ", bucket),
                                range.size() * sizeof(float));
}

absl::Status WeightGatherer::need(size_t begin, size_t end) {
  for (size_t bucket = buckets_.size(); bucket-- > 0;) {
    if (pending_[bucket] == 0) continue;
    if (buckets_[bucket].begin >= end || buckets_[bucket].end <= begin) continue;
    (void)calls_.wait(pending_[bucket]);  // the tracker keeps the error
    pending_[bucket] = 0;
  }
  return calls_.status();
}

}  // namespace baton::engine::train
