// ZeRO-1: one all_gather of updated weights per bucket.
#include "engine/train/data_parallel/zero.h"

#include "absl/strings/str_cat.h"

namespace baton::engine::train {

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
