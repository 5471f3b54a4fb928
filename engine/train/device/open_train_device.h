// The device that `baton train --device` names.
#pragma once

#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/train/step/train_runner.h"

namespace baton::engine::train {

// What --device says.
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
