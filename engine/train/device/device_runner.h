// Training steps on a GPU: `baton train --device cuda`. Parameters, gradients and moments lie in
// its memory; collectives are given gradients and weights there.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/gpu.h"
#include "engine/train/device/device_pass.h"
#include "engine/train/step/train_runner.h"

namespace baton::engine::train {

class DeviceRunner final : public TrainRunner {
 public:
  // The objects that `needs` refers to outlive the runner.
  static absl::StatusOr<std::unique_ptr<DeviceRunner>> create(std::unique_ptr<device::Gpu> gpu,
                                                              const RunnerNeeds& needs);
  ~DeviceRunner() override;

  // "CUDA device 0: NVIDIA H100 80GB HBM3"
  std::string name() const override;
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
  std::span<double> squares() override;
  absl::Status sum_squares(size_t piece, const float* gradients, float divisor) override;
  absl::Status update(size_t piece, int step, float norm, float divisor, float* parameters,
                      const float* gradients) override;
  absl::Status wait() override { return gpu_->wait(); }
  std::array<float*, 2> moments() override { return {first_.data(), second_.data()}; }

 private:
  DeviceRunner(std::unique_ptr<device::Gpu> gpu, const RunnerNeeds& needs);
  absl::Status start(const RunnerNeeds& needs);
  absl::Status copy_to_device(float* to, const float* from, size_t count);

  // In this order: what is on the device goes before it does.
  std::unique_ptr<device::Gpu> gpu_;
  const ParameterMap& map_;
  const OptimizerOptions options_;
  const std::vector<FlatRange> pieces_;
  std::vector<size_t> places_;  // of each piece among the moments
  const size_t blocks_;         // of the flat array's norm
  std::unique_ptr<gpudirect::RegisteredPages> stage_, squares_;
  FlatArray first_, second_;  // moments of the pieces
  std::unique_ptr<DevicePass> pass_;
  std::vector<float> view_;
};

// The device that `baton train --device` names.

// The value of --device.
struct TrainDevice {
  bool cuda = false;           // else the CPU
  std::optional<int> ordinal;  // nothing: ranks of a machine share its devices out between them
};
// "cpu", "cuda", "cuda:N". InvalidArgument for other words.
absl::StatusOr<TrainDevice> parse_train_device(std::string_view text);

// Both for the `local_rank`th rank of this machine: whether the device can be opened, and a maker
// of runners on it. Unavailable, in one line with the remedy: no driver, no such device, no
// kernels.
absl::Status try_device(const TrainDevice& device, int local_rank);
MakeRunner run_on(const TrainDevice& device, int local_rank);

}  // namespace baton::engine::train
