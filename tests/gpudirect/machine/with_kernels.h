// Tests of this machine's GPU and of the kernels on it; skipped where there is none of either.
#pragma once

#include "gpudirect/kernels/image.h"
#include "gpudirect/launcher.h"
#include "tests/test.h"

namespace baton::gpudirect {

class WithKernelsOfThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (kernels::image().empty()) GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    auto device = Device::open(**driver, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto launcher = Launcher::load(*device_);
    ASSERT_TRUE(launcher.ok()) << launcher.status();
    launcher_ = *std::move(launcher);
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
};

}  // namespace baton::gpudirect
