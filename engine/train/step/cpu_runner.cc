// A training step's arithmetic on the CPU.
#include "engine/train/step/train_runner.h"

#include <algorithm>

namespace baton::engine::train {
namespace {

constexpr size_t kAddTask = 16384;  // elements that one thread adds at a time

// target += source, over [begin, end).
void add(ComputePool& pool, size_t begin, size_t end, const float* source, float* target) {
  const auto tasks = static_cast<int64_t>((end - begin + kAddTask - 1) / kAddTask);
  pool.parallel_for(tasks, [&](int64_t task, int) {
    const size_t from = begin + static_cast<size_t>(task) * kAddTask;
    const size_t to = std::min(end, from + kAddTask);
    for (size_t i = from; i < to; ++i) target[i] += source[i];
  });
}

}  // namespace

CpuRunner::CpuRunner(const RunnerNeeds& needs, ComputePool& pool, Communicator* comm)
    : pool_(pool),
      comm_(comm),
      backprop_(needs.map, needs.max_tokens, needs.max_length, pool),
      optimizer_(needs.map, needs.optimizer, needs.pieces, pool),
      squares_(needs.padded / kNormBlock) {}

absl::StatusOr<FlatArray> CpuRunner::make_array(size_t count, bool shared) {
  return FlatArray::make(shared ? comm_ : nullptr, count);
}

absl::Status CpuRunner::write(float* to, const float* from, size_t count) {
  std::copy_n(from, count, to);
  return absl::OkStatus();
}

absl::Status CpuRunner::read(float* to, const float* from, size_t count) {
  std::copy_n(from, count, to);
  return absl::OkStatus();
}

absl::StatusOr<const float*> CpuRunner::view(const float* array, size_t /*count*/) { return array; }

absl::StatusOr<float> CpuRunner::loss_and_gradients(const float* parameters,
                                                    std::span<const int32_t> tokens, int sequences,
                                                    int length, const GradientSums& sums,
                                                    const GradientsReady& ready,
                                                    const ParametersNeeded& needed) {
  const auto written = [&](size_t begin, size_t end) {
    if (sums.sum != sums.gradients) add(pool_, begin, end, sums.gradients, sums.sum);
    if (ready) ready(begin, end);
  };
  return backprop_.loss_and_gradients(parameters, tokens, sequences, length, sums.gradients,
                                      written, needed);
}

absl::StatusOr<float> CpuRunner::loss(const float* parameters, std::span<const int32_t> tokens,
                                      int sequences, int length) {
  return backprop_.loss(parameters, tokens, sequences, length);
}

absl::Status CpuRunner::sum_squares(size_t piece, const float* gradients, float divisor) {
  optimizer_.sum_squares(piece, gradients, divisor, squares_.data());
  return absl::OkStatus();
}

absl::Status CpuRunner::update(size_t piece, int step, float norm, float divisor, float* parameters,
                               const float* gradients) {
  optimizer_.update(piece, step, norm, divisor, parameters, gradients);
  return absl::OkStatus();
}

}  // namespace baton::engine::train
