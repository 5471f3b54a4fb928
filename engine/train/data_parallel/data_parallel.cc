// Launches the collective of each bucket.
#include "engine/train/data_parallel/data_parallel.h"

#include "absl/strings/str_cat.h"

namespace baton::engine::train {

CallTracker::Id GradientReducer::launch(size_t bucket, float* gradients) {
  const FlatRange range = buckets_[bucket];
  const FlatRange part = part_of(range, comm_.rank(), comm_.ranks());
  float* data = gradients + range.begin;
  const Time begin = Clock::steady().now();
  absl::StatusOr<Work> work =
      options_.zero > 0
          ? comm_.reduce_scatter_async(data, gradients + part.begin, part.size(), DataType::kF32,
                                       ReduceOp::kSum)
          : comm_.all_reduce_async(data, data, range.size(), DataType::kF32, ReduceOp::kSum);
  return calls_.add(std::move(work), begin, absl::StrCat("gradients, bucket ", bucket),
                    range.size() * sizeof(float));
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
  return calls_.wait(launched_[bucket]);
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
