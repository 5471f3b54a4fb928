// Opens the device that a rank trains on.
#include "engine/train/device/open_train_device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/device/open_device.h"
#include "engine/train/device/device_runner.h"
#include "gpudirect/driver.h"

namespace baton::engine::train {
namespace {

absl::StatusOr<std::unique_ptr<device::Gpu>> open_gpu(const TrainDevice& device, int local_rank) {
  const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
  if (!driver.ok()) return driver.status();
  int ordinal = device.ordinal.value_or(0), devices = 0;
  if (!device.ordinal.has_value()) {
    const absl::Status status = gpudirect::driver_status(
        **driver, (*driver)->cuDeviceGetCount(&devices), "counting devices");
    if (!status.ok()) return status;
    if (devices > 0) ordinal = local_rank % devices;
  }
  return device::Gpu::open(**driver, ordinal);
}

absl::Status refused(const TrainDevice& device, const absl::Status& why) {
  const std::string name =
      device.ordinal.has_value() ? absl::StrCat("cuda:", *device.ordinal) : "cuda";
  return absl::Status(why.code(), absl::StrCat("--device ", name, ": ", why.message(),
                                               "; --device cpu needs none"));
}

}  // namespace

absl::StatusOr<TrainDevice> parse_train_device(std::string_view text) {
  const absl::StatusOr<std::optional<int>> ordinal = device::parse_device(text);
  if (!ordinal.ok()) return ordinal.status();
  TrainDevice out{.cuda = ordinal->has_value(), .ordinal = *ordinal};
  if (text == "cuda") out.ordinal = std::nullopt;
  return out;
}

absl::Status try_device(const TrainDevice& device, int local_rank) {
  const auto gpu = open_gpu(device, local_rank);
  return gpu.ok() ? absl::OkStatus() : refused(device, gpu.status());
}

MakeRunner run_on(const TrainDevice& device, int local_rank) {
  return [device,
          local_rank](const RunnerNeeds& needs) -> absl::StatusOr<std::unique_ptr<TrainRunner>> {
    absl::StatusOr<std::unique_ptr<device::Gpu>> gpu = open_gpu(device, local_rank);
    if (!gpu.ok()) return refused(device, gpu.status());
    return DeviceRunner::create(*std::move(gpu), needs);
  };
}

}  // namespace baton::engine::train
