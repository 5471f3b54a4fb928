// Tests of this machine's GPU and of the kernels on it; skipped where there is none of either.
#pragma once

#include "gpudirect/kernels/image.h"
#include "gpudirect/launcher.h"
#include "tests/gpudirect/must.h"
#include "tests/test.h"

namespace baton::gpudirect {

class WithKernelsOfThisMachine : public testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<const Driver*> driver = machine_driver();
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    if (kernels::image().empty()) GTEST_SKIP() << "this build has no kernels: nvcc was not found";
    device_ = must(Device::open(**driver, 0));
    launcher_ = must(Launcher::load(*device_));
  }
  std::unique_ptr<Device> device_;
  std::unique_ptr<Launcher> launcher_;
};

}  // namespace baton::gpudirect
