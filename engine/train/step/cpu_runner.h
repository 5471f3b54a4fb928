// Training steps on the CPU: Backprop and AdamW over the host's memory.
#pragma once

#include "collectives/communicator.h"
#include "engine/kernels/compute_pool.h"
#include "engine/train/step/train_runner.h"

namespace baton::engine::train {

class CpuRunner final : public TrainRunner {
 public:
  // `comm` may be null: no other process reaches the arrays then. It and the pool outlive the
  // runner.
  CpuRunner(const RunnerNeeds& needs, ComputePool& pool, Communicator* comm);

  std::string name() const override { return "the CPU"; }
  absl::StatusOr<FlatArray> make_array(size_t count, bool shared) override;
  absl::Status write(float* to, const float* from, size_t count) override;
  absl::Status read(float* to, const float* from, size_t count) override;
  absl::StatusOr<const float*> view(const float* array, size_t count) override;
  absl::StatusOr<float> loss_and_gradients(const float* parameters, std::span<const int32_t> tokens,
                                           int sequences, int length, const GradientSums& sums,
                                           const GradientsReady& ready,
                                           const ParametersNeeded& needed) override;
  absl::StatusOr<float> loss(const float* parameters, std::span<const int32_t> tokens,
                             int sequences, int length) override;
  std::span<double> squares() override { return squares_; }
  absl::Status sum_squares(size_t piece, const float* gradients, float divisor) override;
  absl::Status update(size_t piece, int step, float norm, float divisor, float* parameters,
                      const float* gradients) override;
  absl::Status wait() override { return absl::OkStatus(); }
  absl::Status copy_moments(const FlatRange& range, float* first, float* second) override;
  absl::Status set_moments(const FlatRange& range, const float* first,
                           const float* second) override;

 private:
  ComputePool& pool_;
  Communicator* const comm_;
  Backprop backprop_;
  AdamW optimizer_;
  std::vector<double> squares_;
};

}  // namespace baton::engine::train
