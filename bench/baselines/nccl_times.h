// NCCL's collectives among the GPUs of this machine, a rank on each: timed as baton times its own,
// and what they gave is looked at.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/baselines/baseline_job.h"

namespace baton::baselines {

class NcclGroup {
 public:
  // Unavailable: no GPU. FailedPrecondition: fewer GPUs than ranks, which NCCL does not do.
  // NotFound: no NCCL. Each in one line.
  static absl::StatusOr<std::unique_ptr<NcclGroup>> create(int ranks);
  ~NcclGroup();

  // The time of each iteration of calls of `count`, in us. Unimplemented: NCCL has no such call,
  // type or operation. DataLoss: its result was wrong.
  absl::StatusOr<std::vector<double>> times(const Job& job, size_t count);

 private:
  class Impl;
  explicit NcclGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::baselines
