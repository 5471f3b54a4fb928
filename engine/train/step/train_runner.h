// Runs a training step: on the CPU (cpu_runner.cc), or on a device (../device/device_runner.h).
//
// The trainer decides what happens in which order; a runner has the arrays and does the arithmetic.
// Every runner gives the CPU's bits, so that ranks on devices and on CPUs may train one model.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "engine/kernels/compute_pool.h"
#include "engine/train/backward/backprop.h"
#include "engine/train/backward/parameters.h"
#include "engine/train/data_parallel/buckets.h"
#include "engine/train/data_parallel/optimizer.h"

namespace baton::engine::train {

// The destination of a micro-batch's gradient. All are flat arrays of the runner's.
struct GradientSums {
  float* gradients = nullptr;  // is written, not added to
  float* sum = nullptr;        // += gradients, unless it is that array
};

// Not thread-safe: of one trainer. Arrays are memory of where the runner computes: of a device,
// which the CPU must not follow, but collectives may. After an error it is of no more use.
class TrainRunner {
 public:
  virtual ~TrainRunner() = default;
  // For people.
  virtual std::string name() const = 0;

  // A flat array of zeros, that does not outlive the runner. `shared`: for collectives.
  virtual absl::StatusOr<FlatArray> make_array(size_t count, bool shared) = 0;
  // To and from the host's memory. They wait.
  virtual absl::Status write(float* to, const float* from, size_t count) = 0;
  virtual absl::Status read(float* to, const float* from, size_t count) = 0;
  // The array as the host sees it, until the next call of view(): the array itself, or a copy.
  virtual absl::StatusOr<const float*> view(const float* array, size_t count) = 0;

  // As Backprop::loss_and_gradients(). A range of gradients is ready when it has arrived in all of
  // `sums`, for any reader; returns when nothing reads or writes them any more.
  virtual absl::StatusOr<float> loss_and_gradients(const float* parameters,
                                                   std::span<const int32_t> tokens, int sequences,
                                                   int length, const GradientSums& sums,
                                                   const GradientsReady& ready,
                                                   const ParametersNeeded& needed) = 0;
  virtual absl::StatusOr<float> loss(const float* parameters, std::span<const int32_t> tokens,
                                     int sequences, int length) = 0;

  // As the calls of AdamW, for its pieces; done when wait() has returned. The host's place for the
  // sum of squares of each block of the flat array.
  virtual std::span<double> squares() = 0;
  virtual absl::Status sum_squares(size_t piece, const float* gradients, float divisor) = 0;
  virtual absl::Status update(size_t piece, int step, float norm, float divisor, float* parameters,
                              const float* gradients) = 0;
  virtual absl::Status wait() = 0;
  // First and second moments of the pieces, one behind the other, where the runner computes.
  virtual std::array<float*, 2> moments() = 0;
};

// The objects and sizes that a runner needs.
struct RunnerNeeds {
  const ParameterMap& map;
  const OptimizerOptions& optimizer;
  std::vector<FlatRange> pieces;  // of the flat array, that this rank updates
  size_t padded = 0;              // elements of the flat array
  int max_tokens = 0;             // of a micro-batch
  int max_length = 0;             // of a sequence
};
using MakeRunner =
    std::function<absl::StatusOr<std::unique_ptr<TrainRunner>>(const RunnerNeeds& needs)>;

// Training steps on the CPU: Backprop and AdamW over the host's memory.

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
  std::array<float*, 2> moments() override { return optimizer_.moments(); }

 private:
  ComputePool& pool_;
  Communicator* const comm_;
  Backprop backprop_;
  AdamW optimizer_;
  std::vector<double> squares_;
};

}  // namespace baton::engine::train
