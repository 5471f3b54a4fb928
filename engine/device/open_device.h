// What --device says, and the device that it names.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/device/gpu.h"
#include "engine/model/arithmetic.h"
#include "engine/model/checkpoint.h"
#include "engine/model/model_runner.h"

namespace baton::engine::device {

// "cpu": nothing. "cuda" and "cuda:N": the device's number. InvalidArgument for other words.
absl::StatusOr<std::optional<int>> parse_device(std::string_view text);

// A model on that device of this machine. In one line with the remedy, Unavailable: no driver, no
// such device. Unimplemented: no kernels for it.
absl::StatusOr<std::unique_ptr<ModelRunner>> run_on_device(int ordinal,
                                                           const Checkpoint& checkpoint,
                                                           Arithmetic arithmetic);

}  // namespace baton::engine::device
