// A model on a device of the fake driver, for tests.
#pragma once

#include "engine/device/device_model.h"
#include "tests/engine_model/test_model.h"
#include "tests/gpudirect/fake/clean_driver.h"
#include "tests/test.h"

namespace baton::engine::device {

// On the fake that is there.
inline absl::StatusOr<std::unique_ptr<DeviceModel>> on_fake(
    const Checkpoint& checkpoint, Arithmetic arithmetic = Arithmetic::kFp32) {
  auto driver = gpudirect::load_driver(gpudirect::FakeDriver::get_proc_address());
  if (!driver.ok()) return driver.status();
  auto gpu = Gpu::open(*driver, 0, gpudirect::FakeDriver::image());
  if (!gpu.ok()) return gpu.status();
  return DeviceModel::create(*std::move(gpu), checkpoint, arithmetic);
}

}  // namespace baton::engine::device
